"""The doctor's probes, and an example, where there is a CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchscout.cli.doctor import software_checks
from torchscout.cli.doctor.facts import Grade
from torchscout.cli.doctor.probes import ask_torch

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_devices_nccl_and_the_fused_signature_are_found():
    facts = ask_torch()
    assert facts.problem is None
    assert facts.devices[0] == torch.cuda.get_device_name(0)
    assert facts.nccl
    assert (facts.fused, facts.fused_problem) == (True, None)
    assert max(facts.attention.values()) == 1, "as replay runs them, they repeat"
    for check in (
        software_checks.backends,
        software_checks.cuda,
        software_checks.triton,
        software_checks.attention,
    ):
        assert check(facts).status is Grade.OK


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "huggingface"])
def test_an_example_trains_over_nccl_as_far_as_one_device_goes(name: str, tmp_path: Path):
    """One rank has no peers: it trains, and the log says that nothing is compared."""
    pytest.importorskip("zmq", reason="checkpoints and observers talk over ZeroMQ")
    if name == "huggingface":
        pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*command, ROOT / "examples" / f"{name}.py", "--steps", "5"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "TORCHSCOUT_MEMORY": str(tmp_path / "memory")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "step   5" in done.stdout
    assert "0% of the parameters are compared among replicas" in done.stdout
    assert "found      nothing" in done.stdout
