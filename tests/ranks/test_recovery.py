"""From an incident to a job that trains again, under plain torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.recovery_job import CULPRIT, FAULTY_STEP
from torchscout.decision.records.record import Action, Decision
from torchscout.decision.records.recorder import IncidentLog
from torchscout.decision.recovery.restart_plan import RestartPlan
from torchscout.observer.record.directory import read_end

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RANKS = 3


def run(
    folder: Path, fault: str, act: str, *, restarts: int = 3, ranks: int = RANKS
) -> subprocess.CompletedProcess[str]:
    """Run the job under torchrun to its end, with a fault in its first life."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    options = [f"--max-restarts={restarts}", "--monitor-interval=0.2", "--rdzv-backend=c10d"]
    options += ["--rdzv-endpoint=localhost:0", "-m", "tests.support.recovery_job"]
    # torchrun's own restart needs the first setting over Gloo (see docs/doctor.md).
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*torchrun, *options, str(folder), fault, act],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | environment,
        check=False,
    )


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def decisions(folder: Path, life: int = 0) -> list[Decision]:
    return IncidentLog.read(folder / f"run-{life}").decisions


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a job in which nothing happens and nothing is decided."""
    folder = tmp_path_factory.mktemp("alone")
    ended = run(folder, "none", "restart,replace")
    assert ended.returncode == 0, ended.stderr
    assert decisions(folder) == []
    assert not RestartPlan.path(folder / "checkpoints").exists()
    (bits,) = {each["bits"] for each in answers(folder)}
    return bits


@pytest.mark.parametrize("fault", ["stopped", "asleep"])
def test_a_hung_job_is_restarted_and_ends_as_if_nothing_had_happened(fault: str, tmp_path: Path, alone: str):
    ended = run(tmp_path, fault, "restart")
    assert (tmp_path / f"suffered-{CULPRIT}").exists()
    assert ended.returncode == 0, ended.stderr
    (decision,) = decisions(tmp_path)
    assert (decision.action, decision.ranks) == (Action.RESTART, (CULPRIT,))
    assert decision.is_carried_out
    assert f"torchscout: decision: {decision.sentence}" in ended.stderr
    assert f"torchscout: this job was restarted: {decision.sentence}" in ended.stderr
    assert {(each["bits"], each["life"]) for each in answers(tmp_path)} == {(alone, 1)}
    assert {each["resumed"] for each in answers(tmp_path)} == {FAULTY_STEP - 1}
    plan = RestartPlan.read(tmp_path / "checkpoints")
    assert (plan.excluded, len(plan.restarts), plan.sentence) == ((), 1, ""), "the plan was used"


def test_corruption_excludes_the_machine_and_the_verified_checkpoint_is_loaded(tmp_path: Path, alone: str):
    ended = run(tmp_path, "corrupt", "restart,replace")
    assert ended.returncode == 0, ended.stderr
    (decision,) = decisions(tmp_path)
    assert (decision.action, decision.ranks) == (Action.REPLACE, (CULPRIT,))
    assert {(each["bits"], each["life"]) for each in answers(tmp_path)} == {(alone, 1)}
    assert all("verified checkpoint" in each["reason"] for each in answers(tmp_path))
    assert RestartPlan.read(tmp_path / "checkpoints").excluded == decision.hosts
    assert f"the job runs on excluded machines: {decision.hosts[0]}" in ended.stderr


def test_ranks_that_fail_before_they_learn_of_the_decision_add_no_restart(tmp_path: Path, alone: str):
    """One rank is busy with the incident when the others leave, and loses its connections to them."""
    ended = run(tmp_path, "unheard", "restart,replace")
    assert ended.returncode == 0, ended.stderr
    end = read_end(tmp_path / "run-0", CULPRIT + 1)
    assert end is not None
    assert end.how == "failed", "it did not know"
    (decision,) = decisions(tmp_path)
    assert (decision.action, decision.ranks) == (Action.REPLACE, (CULPRIT,))
    (incident,) = IncidentLog.read(tmp_path / "run-0").incidents
    assert incident.ranks == (CULPRIT,)
    assert len(RestartPlan.read(tmp_path / "checkpoints").restarts) == 1
    assert {(each["bits"], each["life"]) for each in answers(tmp_path)} == {(alone, 1)}
    assert all("verified checkpoint" in each["reason"] for each in answers(tmp_path))


def test_an_exception_on_one_rank_is_restarted_by_torchrun_and_resumed(tmp_path: Path, alone: str):
    ended = run(tmp_path, "raises", "restart")
    assert ended.returncode == 0, ended.stderr
    assert {(each["bits"], each["life"]) for each in answers(tmp_path)} == {(alone, 1)}


def test_a_machine_that_corrupts_every_run_stops_the_job(tmp_path: Path):
    """There is no other machine, so that the same one is used again until the policy gives up."""
    ended = run(tmp_path, "always_corrupt", "restart,replace", restarts=6)
    assert ended.returncode != 0
    actions = [decision.action for life in range(4) for decision in decisions(tmp_path, life)]
    assert actions == [Action.REPLACE, Action.REPLACE, Action.STOP]
    assert RestartPlan.read(tmp_path / "checkpoints").is_stopped
    assert "An earlier run decided: Stop the job" in ended.stderr
    assert not (tmp_path / "rank-0.json").exists(), "the job never ends on corrupt state"


def test_by_default_a_decision_is_only_logged(tmp_path: Path):
    ended = run(tmp_path, "corrupt", "")
    assert ended.returncode == 0, ended.stderr
    assert {each["life"] for each in answers(tmp_path)} == {0}
    assert [each.is_carried_out for each in decisions(tmp_path)] == [False]
    assert "torchscout: decision (dry run): Replace machine" in ended.stderr
    assert not RestartPlan.path(tmp_path / "checkpoints").exists()
