"""What a session does about incidents: it reports a decision once, writes the plan, and leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_policy import HANG, SDC, decided, incident
from torchscout.checkpoint.restart_plan import RestartPlan
from torchscout.communicators import Job
from torchscout.config import RecoveryConfig
from torchscout.decision.record import Action, Failure, Incident, Manifestation, Scope
from torchscout.decision.recorder import IncidentLog
from torchscout.mesh import Mesh
from torchscout.session import recovery
from torchscout.session.recovery import EXIT_STATUS, Recovery

ACT = RecoveryConfig(act=("restart", "replace"))
STALL = incident(Manifestation.HANG, action=Action.INSPECT, scope=Scope.JOB)


def handled(
    folder: Path, found: Incident, config: RecoveryConfig, rank: int = 0, plan_folder: Path | None = None
) -> list[int]:
    """Return the exit statuses with which the worker left."""
    left: list[int] = []
    job = Job(rank, Mesh.grid(replica=4), ["node-1"] * 4, "token", folder / "run")
    session = Recovery(job, config, RestartPlan.first(), plan_folder, None, exit=left.append)
    session.handle(found)
    return left


@pytest.mark.parametrize("found", [HANG, SDC])
def test_a_worker_leaves_after_the_plan_is_written(tmp_path: Path, found: Incident):
    assert handled(tmp_path, found, ACT, plan_folder=tmp_path / "plans") == [EXIT_STATUS]
    plan = RestartPlan.read(tmp_path / "plans")
    assert plan.failure is Failure(found.manifestation.value)
    (decision,) = IncidentLog.read(tmp_path / "run").decisions
    assert decision.is_carried_out
    assert plan.restarts == (decision,)


@pytest.mark.parametrize(
    ("found", "config", "has_folder"),
    [
        (HANG, RecoveryConfig(), True),
        (SDC, RecoveryConfig(act=("restart",)), True),
        (HANG, ACT, False),
        (STALL, ACT, True),
    ],
    ids=["dry run", "replacing is not allowed", "no folder for the plan", "nobody is named"],
)
def test_otherwise_the_decision_is_only_recorded(
    tmp_path: Path, found: Incident, config: RecoveryConfig, has_folder: bool
):
    folder = tmp_path / "plans" if has_folder else None
    assert handled(tmp_path, found, config, plan_folder=folder) == []
    assert not (tmp_path / "plans").exists()
    (decision,) = IncidentLog.read(tmp_path / "run").decisions
    assert not decision.is_carried_out


def test_one_rank_reports_and_all_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recovery, "_SECONDS_TO_REPORT", 0.0)
    for rank in range(4):
        assert handled(tmp_path, HANG, ACT, rank, tmp_path / "plans") == [EXIT_STATUS]
    assert len(IncidentLog.read(tmp_path / "run").decisions) == 1


def test_a_run_directory_that_cannot_be_written_does_not_keep_a_worker(tmp_path: Path):
    (tmp_path / "run").touch()
    assert handled(tmp_path, HANG, ACT, plan_folder=tmp_path / "plans") == [EXIT_STATUS]
    assert RestartPlan.read(tmp_path / "plans").failure is Failure.HANG


def test_a_stop_that_cannot_be_written_does_not_end_the_worker(tmp_path: Path):
    """Without the plan the launcher would restart the job again and again."""
    (tmp_path / "file").touch()
    stopping = RecoveryConfig(act=("restart", "replace"), max_restarts=1)
    left: list[int] = []
    job = Job(0, Mesh.grid(replica=4), ["node-1"] * 4, "token", tmp_path / "run")
    plan = RestartPlan.first().after(decided(HANG))
    session = Recovery(job, stopping, plan, tmp_path / "file" / "plans", None, exit=left.append)
    session.handle(HANG)
    (decision,) = IncidentLog.read(tmp_path / "run").decisions
    assert decision.action is Action.STOP
    assert left == []
