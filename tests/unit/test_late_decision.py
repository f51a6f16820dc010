"""What an observer does in place of a trainer that ended before there was a verdict."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.test_policy import ALL, SDC, decided, incident
from torchscout.config import ObserverConfig, RecoveryConfig
from torchscout.decision.types import Action, Decision, Failure, Incident, Manifestation, Resolved, Scope
from torchscout.observer.late_decision import LateDecision
from torchscout.observer.spec import ObserverSpec
from torchscout.run.folder import Identity
from torchscout.run.reader import IncidentLog
from torchscout.run.restart import RestartPlan
from torchscout.run.writer import record_one

LOST = incident(Manifestation.HANG, action=Action.REPLACE, scope=Scope.MACHINE, hosts=("b",))
LATER = incident(Manifestation.HANG, step=50, hosts=("c",))
ENDED = incident(Manifestation.CRASH, action=Action.PREFLIGHT, scope=Scope.MACHINE, hosts=("b",))


def spec(folder: Path, rank: int = 0, **fields: object) -> ObserverSpec:
    plain = ObserverSpec(
        rank=rank,
        size=4,
        record="/record",
        run=Identity(str(folder / "run")),
        token="t" * 16,
        config=ObserverConfig(),
        recovery=ALL,
        plan_folders=(str(folder / "checkpoints"), str(folder / "agent")),
        began=time.monotonic() - 10.0,
    )
    return replace(plain, **fields)


def ended(folder: Path, found: Incident, rank: int = 0, **fields: object) -> LateDecision:
    """The trainer ends, and there is an incident."""
    late = LateDecision(spec(folder, rank, **fields))
    late.must_end(found)
    late.trainer_ended()
    return late


def plans(folder: Path) -> list[RestartPlan]:
    return [RestartPlan.read(folder / name) for name in ("checkpoints", "agent")]


def decisions(folder: Path) -> list[Decision]:
    return IncidentLog.read(folder / "run").decisions


@pytest.mark.parametrize(
    ("found", "excluded", "failure"),
    [(LOST, ("b",), Failure.MACHINES_GONE), (LATER, (), Failure.HANG), (ENDED, (), Failure.OTHER)],
)
def test_the_plan_is_written_once_the_trainer_has_ended(
    tmp_path: Path, found: Incident, excluded: tuple[str, ...], failure: Failure
):
    late = LateDecision(spec(tmp_path))
    late.trainer_ended()
    assert late.must_end(found)
    assert plans(tmp_path) == [RestartPlan()] * 2, "its trainer may do it"
    for _ in range(2):
        late.trainer_ended()
    for plan in plans(tmp_path):
        assert (plan.excluded, plan.failure, len(plan.restarts)) == (excluded, failure, 1)
        assert 10 < plan.restarts[0].seconds < 60
    (decision,) = decisions(tmp_path)
    assert (decision.action, decision.is_carried_out) == (found.action, True)


def test_what_a_trainer_has_done_is_not_done_again(tmp_path: Path):
    done = replace(decided(LOST), devices=("rank 2: GPU",), is_carried_out=True)
    RestartPlan().after(done).write(tmp_path / "checkpoints")
    record_one(tmp_path / "run", 0, done)
    ended(tmp_path, LOST)
    assert [len(plan.restarts) for plan in plans(tmp_path)] == [1, 1]
    assert decisions(tmp_path) == [done]


@pytest.mark.parametrize("is_author", [True, False])
def test_another_rank_records_only_what_nobody_has_recorded(tmp_path: Path, is_author: bool):
    late = ended(tmp_path, LOST, rank=1)
    late.is_author = is_author
    assert decisions(tmp_path) == []
    late.close()
    assert len(decisions(tmp_path)) == is_author


@pytest.mark.parametrize(
    ("fields", "action"),
    [
        ({"recovery": RecoveryConfig(), "plan_folders": ()}, None),
        ({"recovery": RecoveryConfig(act=("restart",))}, Action.RESTART),
    ],
    ids=["dry run", "replacing is not allowed"],
)
def test_no_more_is_done_than_is_permitted(tmp_path: Path, fields: dict[str, object], action: Action | None):
    ended(tmp_path, LOST, **fields)
    assert [each.action for plan in plans(tmp_path) for each in plan.restarts] == [action] * 2 * bool(action)
    (decision,) = decisions(tmp_path)
    assert (decision.action, decision.is_carried_out) == (action or Action.REPLACE, action is not None)


def test_corruption_is_decided_by_trainers_alone(tmp_path: Path):
    assert not LateDecision(spec(tmp_path)).must_end(SDC)
    ended(tmp_path, SDC)
    assert not (tmp_path / "run").exists()


def test_a_trainer_that_ends_after_the_incident_is_over_did_not_end_because_of_it(tmp_path: Path):
    over = Resolved(
        incident=LATER.id, step=LATER.step, ranks=LATER.ranks, sentence=LATER.sentence, stalled_seconds=1.0
    )
    late = LateDecision(spec(tmp_path))
    assert late.must_end(LATER)
    assert not late.is_over(replace(over, incident="another")), "another incident"
    assert late.is_over(over)
    late.trainer_ended()
    assert plans(tmp_path) == [RestartPlan()] * 2
    assert not late.is_over(over)


def test_a_decision_of_the_last_run_that_comes_late_is_kept(tmp_path: Path):
    """This run began before it; its own decision must not let the machine in again."""
    ended(tmp_path, LOST)
    ended(tmp_path, LATER)
    for plan in plans(tmp_path):
        assert plan.excluded == ("b",)
        assert [each.step for each in plan.restarts] == [LOST.step, LATER.step]
        assert plan.failure is Failure.HANG


def test_a_job_that_was_stopped_stays_stopped(tmp_path: Path):
    """The workers that refuse to go on have ended before they finished."""
    stop = replace(decided(LOST), action=Action.STOP, sentence="Stop the job: nothing is left.")
    RestartPlan().after(stop).write(tmp_path / "checkpoints")
    ended(tmp_path, LOST)
    assert RestartPlan.read(tmp_path / "checkpoints").sentence == stop.sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("was_used", [True, False])
@pytest.mark.parametrize("has_trainer_left", [True, False])
def test_only_a_plan_that_was_not_used_still_counts(tmp_path: Path, was_used: bool, has_trainer_left: bool):
    """A job that has resumed after corruption, and then hangs, takes its latest checkpoint."""
    began = RestartPlan().after(replace(decided(SDC), is_carried_out=True))
    now = began.used() if was_used else began
    now = now.after(decided(LATER, *began.restarts)) if has_trainer_left else now
    now.write(tmp_path / "checkpoints")
    ended(tmp_path, LATER, plan=began)
    failure = Failure.HANG if was_used else Failure.SDC
    assert [(plan.failure, len(plan.restarts)) for plan in plans(tmp_path)] == [(failure, 2)] * 2
