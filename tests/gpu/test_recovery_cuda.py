"""A hang on a CUDA device, over NCCL: ended, restarted by torchrun, resumed; bitwise as if undisturbed.

On one shared device this takes minutes: without MPS the ranks take turns on it, and with MPS the ranks of the
restarted job hang in NCCL, because the daemon has lost clients.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.recovery_job import CULPRIT, FAULTY_STEP
from torchscout.decision.records.record import Action
from torchscout.decision.records.recorder import IncidentLog

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3), pytest.mark.slow]
RANKS = 3


def run(folder: Path, fault: str, environment: dict[str, str]) -> set[tuple[str, int, int]]:
    """Run the job under torchrun to its end; return weights, life and resumed step of its ranks."""
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    options = ["--max-restarts=2", "--monitor-interval=0.2", "--rdzv-backend=c10d"]
    options += ["--rdzv-endpoint=localhost:0", "-m", "tests.support.recovery_job"]
    ended = subprocess.run(
        [*torchrun, *options, str(folder), fault, "restart", "cuda"],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    return {(each["bits"], each["life"], each["resumed"]) for each in found}


@pytest.mark.parametrize("fault", ["asleep", "stuck"])
def test_a_hung_job_is_restarted_and_ends_as_if_nothing_had_happened(
    fault: str, tmp_path: Path, alone: dict[str, str]
):
    """``asleep``: the others wait on their devices. ``stuck``: so does the culprit, for its own kernel."""
    ((bits, _, _),) = run(tmp_path / "undisturbed", "none", alone)
    folder = tmp_path / "hung"
    ((found, life, resumed),) = run(folder, fault, alone)
    assert (found, life) == (bits, 1)
    assert 0 < resumed <= FAULTY_STEP
    assert (folder / f"suffered-{CULPRIT}").exists()
    (decision,) = IncidentLog.read(folder / "run-0").decisions
    assert (decision.action, decision.ranks) == (Action.RESTART, (CULPRIT,))
    assert decision.is_carried_out
