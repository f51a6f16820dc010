"""A hang on a CUDA device, over NCCL: ended, restarted by torchrun, resumed; bitwise as if undisturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.recovery_job import CULPRIT, FAULTY_STEP, control_daemon
from torchscout.decision.records.record import Action
from torchscout.decision.records.recorder import IncidentLog

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3), pytest.mark.slow]
RANKS = 3
IS_SHARED = "CUDA_MPS_PIPE_DIRECTORY" in os.environ


@contextmanager
def daemons(folder: Path) -> Iterator[None]:
    """Where ranks share a device through MPS, give each life of the job a daemon of its own.

    A daemon whose clients were killed needs long to recover, and NCCL hangs in the meantime. The job ends the
    servers of its earlier life.
    """
    shared = [folder / f"mps-{life}" for life in range(2) if IS_SHARED]
    for each in shared:
        each.mkdir()
        control_daemon(each, "-d")
    yield
    for each in shared:
        control_daemon(each, command="quit -t 5\n")


def run(folder: Path, fault: str) -> set[tuple[str, int, int]]:
    """Run the job under torchrun to its end; return weights, life and resumed step of its ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    options = ["--max-restarts=2", "--monitor-interval=0.2", "--rdzv-backend=c10d"]
    options += ["--rdzv-endpoint=localhost:0", "-m", "tests.support.recovery_job"]
    ended = subprocess.run(
        [*torchrun, *options, str(folder), fault, "restart", "cuda"],
        capture_output=True,
        text=True,
        timeout=150,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    return {(each["bits"], each["life"], each["resumed"]) for each in found}


own_device = pytest.mark.skipif(
    IS_SHARED, reason="a kernel that does not end keeps an MPS server from ending"
)


@pytest.mark.parametrize("fault", ["asleep", pytest.param("stuck", marks=own_device)])
def test_a_hung_job_is_restarted_and_ends_as_if_nothing_had_happened(fault: str, tmp_path: Path):
    """``asleep``: the others wait on their devices. ``stuck``: so does the culprit, for its own kernel."""
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "hung"
    undisturbed.mkdir()
    ((bits, _, _),) = run(undisturbed, "none")
    folder.mkdir()
    with daemons(folder):
        ((found, life, resumed),) = run(folder, fault)
    assert (found, life) == (bits, 1)
    assert 0 < resumed <= FAULTY_STEP
    assert (folder / f"suffered-{CULPRIT}").exists()
    (decision,) = IncidentLog.read(folder / "run-0").decisions
    assert (decision.action, decision.ranks) == (Action.RESTART, (CULPRIT,))
    assert decision.is_carried_out
