"""The device coordinate where there is no device; see tests/gpu for the rest."""

from __future__ import annotations

import logging
from ctypes.util import find_library
from pathlib import Path

import pytest
import torch

from torchscout.observer.device import DeviceProgress, device_of
from torchscout.observer.record.reader import ProgressReader
from torchscout.observer.record.writer import ProgressWriter

without_cuda = pytest.mark.skipif(
    find_library("cuda") is not None, reason="for machines without a CUDA driver"
)


def test_modules_on_the_host_have_no_device():
    assert device_of([torch.nn.Linear(2, 2), torch.nn.ReLU()]) is None


@without_cuda
def test_without_a_driver_it_says_so_once_and_stays_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    writer = ProgressWriter.create(tmp_path / "records", 0)
    with caplog.at_level(logging.WARNING, "torchscout"):
        coordinate = DeviceProgress(writer, torch.device("cuda", 0))
        coordinate._thread.join(10)
        for step in (1, 2):
            coordinate.step_finished(step)
        coordinate.close()
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith("torchscout: the progress of the device is unknown from now on: libcuda")
    assert ProgressReader(writer.path).read().device_step is None
    writer.close()
