"""A device has the name by which its vendor's tools know it."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from torchscout.utils.identity import device_name

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no nvidia-smi to compare with")
def test_uuid_and_pci_address_are_those_of_nvidia_smi():
    query = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
    shown = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    for index in range(torch.cuda.device_count()):
        uuid, address, *_ = device_name(torch.cuda.get_device_properties(index)).split(", ")
        (line,) = [each for each in shown.splitlines() if uuid in each]
        assert line.lower().endswith(address.removeprefix("PCI ").lower()), line
