"""A hang on a CUDA device, over NCCL: ended, restarted by torchrun, resumed; bitwise as if undisturbed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evaluation.jobs.contracts import FAULTY
from evaluation.jobs.script import FAULTY_STEP, control_daemon
from tests.support.restarts import answers, run
from torchscout.decision.types import Action
from torchscout.run.reader import IncidentLog

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3), pytest.mark.slow]
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


def ended(folder: Path, fault: str) -> set[tuple[str, int, int]]:
    """Run the job to its end; return weights, life and resumed step of its ranks."""
    done = run(folder, "--fault", fault, "--act", "restart", "--cuda", restarts=2)
    assert done.returncode == 0, done.stderr[-4000:]
    return {(each["bits"], each["life"], each["resumed"]) for each in answers(folder)}


own_device = pytest.mark.skipif(
    IS_SHARED, reason="a kernel that does not end keeps an MPS server from ending"
)


@pytest.mark.parametrize("fault", ["asleep", pytest.param("stuck", marks=own_device)])
def test_a_hung_job_is_restarted_and_ends_as_if_nothing_had_happened(fault: str, tmp_path: Path):
    """``asleep``: the others wait on their devices. ``stuck``: so does the culprit, for its own kernel."""
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "hung"
    undisturbed.mkdir()
    ((bits, _, _),) = ended(undisturbed, "none")
    folder.mkdir()
    with daemons(folder):
        ((found, life, resumed),) = ended(folder, fault)
    assert (found, life) == (bits, 1)
    assert 0 < resumed < FAULTY_STEP
    assert (folder / f"suffered-{FAULTY}").exists()
    (decision,) = IncidentLog.read(folder / "run-0").decisions
    assert (decision.action, decision.ranks) == (Action.RESTART, (FAULTY,))
    assert decision.is_carried_out
