"""What an observer does in place of a trainer that ended before there was a verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.test_policy import SDC, decided, incident
from torchscout.config import ObserverConfig, RecoveryConfig
from torchscout.decision.records.recorder import IncidentLog, record_one
from torchscout.decision.recovery.restart_plan import RestartPlan
from torchscout.decision.types import Action, Failure, Manifestation, Scope
from torchscout.observer.late_decision import LateDecision
from torchscout.observer.spec import ObserverSpec

LOST = incident(Manifestation.HANG, action=Action.REPLACE, scope=Scope.MACHINE, hosts=("b",))
ACT = RecoveryConfig(act=("restart", "replace"))


def spec(folder: Path, rank: int = 0, **fields: object) -> ObserverSpec:
    plain = ObserverSpec(
        rank=rank,
        size=4,
        record="/record",
        run_dir=str(folder / "run"),
        token="t" * 16,
        config=ObserverConfig(),
        recovery=ACT,
        plan_folders=(str(folder / "checkpoints"), str(folder / "agent")),
    )
    return replace(plain, **fields)


def plans(folder: Path) -> list[RestartPlan]:
    return [RestartPlan.read(folder / name) for name in ("checkpoints", "agent")]


def test_the_plan_is_written_once_the_trainer_has_ended(tmp_path: Path):
    late = LateDecision(spec(tmp_path))
    late.trainer_ended()
    assert late.must_end(LOST)
    assert plans(tmp_path) == [RestartPlan.first()] * 2, "its trainer may do it"
    for _ in range(2):
        late.trainer_ended()
    for plan in plans(tmp_path):
        assert (plan.excluded, plan.failure, len(plan.restarts)) == (("b",), Failure.MACHINES_GONE, 1)
    (decision,) = IncidentLog.read(tmp_path / "run").decisions
    assert (decision.action, decision.is_carried_out) == (Action.REPLACE, True)


def test_what_a_trainer_has_done_is_not_done_again(tmp_path: Path):
    done = replace(decided(LOST), devices=("rank 2: GPU",), is_carried_out=True)
    RestartPlan.first().after(done).write(tmp_path / "checkpoints")
    record_one(tmp_path / "run", 0, done)
    late = LateDecision(spec(tmp_path))
    late.must_end(LOST)
    late.trainer_ended()
    assert [len(plan.restarts) for plan in plans(tmp_path)] == [1, 1]
    assert IncidentLog.read(tmp_path / "run").decisions == [done]


@pytest.mark.parametrize("is_author", [True, False])
def test_another_rank_records_only_what_nobody_has_recorded(tmp_path: Path, is_author: bool):
    late = LateDecision(spec(tmp_path, rank=1))
    late.is_author = is_author
    late.must_end(LOST)
    late.trainer_ended()
    assert IncidentLog.read(tmp_path / "run").decisions == []
    late.close()
    assert len(IncidentLog.read(tmp_path / "run").decisions) == is_author


@pytest.mark.parametrize(
    "fields",
    [{"recovery": RecoveryConfig(), "plan_folders": ()}, {"recovery": RecoveryConfig(act=("restart",))}],
    ids=["dry run", "replacing is not allowed"],
)
def test_without_permission_the_decision_is_only_recorded(tmp_path: Path, fields: dict[str, object]):
    late = LateDecision(spec(tmp_path, **fields))
    assert not late.must_end(LOST)
    late.trainer_ended()
    assert plans(tmp_path) == [RestartPlan.first()] * 2
    (decision,) = IncidentLog.read(tmp_path / "run").decisions
    assert not decision.is_carried_out


def test_corruption_is_decided_by_trainers_alone(tmp_path: Path):
    late = LateDecision(spec(tmp_path))
    assert not late.must_end(SDC)
    late.trainer_ended()
    assert not (tmp_path / "run").exists()


def test_a_decision_of_the_last_run_that_comes_late_is_kept(tmp_path: Path):
    """This run began before it; its own decision must not let the machine in again."""
    late = LateDecision(spec(tmp_path))
    late.must_end(LOST)
    late.trainer_ended()
    own = incident(Manifestation.HANG, step=50, hosts=("c",))
    later = LateDecision(spec(tmp_path))
    later.must_end(own)
    later.trainer_ended()
    for plan in plans(tmp_path):
        assert plan.excluded == ("b",)
        assert [each.step for each in plan.restarts] == [LOST.step, 50]
        assert plan.failure is Failure.HANG


def test_a_job_that_was_stopped_stays_stopped(tmp_path: Path):
    """The workers that refuse to go on have ended before they finished."""
    stop = replace(decided(LOST), action=Action.STOP, sentence="Stop the job: nothing is left.")
    RestartPlan.first().after(stop).write(tmp_path / "checkpoints")
    late = LateDecision(spec(tmp_path))
    late.must_end(LOST)
    late.trainer_ended()
    assert RestartPlan.read(tmp_path / "checkpoints").sentence == stop.sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("has_trainer_left", [True, False])
def test_a_plan_that_was_used_no_longer_counts(tmp_path: Path, has_trainer_left: bool):
    """A job that has resumed after corruption, and then hangs, takes its latest checkpoint."""
    began = RestartPlan.first().after(replace(decided(SDC), is_carried_out=True))
    hang = incident(Manifestation.HANG, step=50)
    now = began.used().after(decided(hang, *began.restarts)) if has_trainer_left else began.used()
    now.write(tmp_path / "checkpoints")
    late = LateDecision(spec(tmp_path, plan=began))
    assert late.must_end(hang)
    late.trainer_ended()
    for plan in plans(tmp_path):
        assert (plan.failure, len(plan.restarts)) == (Failure.HANG, 2)


def test_a_plan_that_was_not_used_still_counts(tmp_path: Path):
    began = RestartPlan.first().after(replace(decided(SDC), is_carried_out=True))
    began.write(tmp_path / "checkpoints")
    late = LateDecision(spec(tmp_path, plan=began))
    late.must_end(incident(Manifestation.HANG, step=50))
    late.trainer_ended()
    assert [plan.failure for plan in plans(tmp_path)] == [Failure.SDC, Failure.SDC]
