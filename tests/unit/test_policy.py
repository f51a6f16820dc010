"""The recovery policy: what is decided about each kind of incident, and how answers escalate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchscout.config import RecoveryConfig
from torchscout.decision.consensus.rules import Status, Verdict
from torchscout.decision.records.record import (
    Action,
    Decision,
    EvidenceRecord,
    Failure,
    Incident,
    Manifestation,
    Scope,
)
from torchscout.decision.recovery.policy import decide, is_allowed

CONFIG = RecoveryConfig()


def incident(
    manifestation: Manifestation,
    *,
    action: Action = Action.RESTART,
    scope: Scope = Scope.RANK,
    ranks: tuple[int, ...] = (2,),
    hosts: tuple[str, ...] = ("node-1",),
    step: int = 40,
    times: tuple[float, ...] = (10.0, 10.0, 20.0, 10.0),
    surface: str = "time/module",
) -> Incident:
    outliers = (2,) if manifestation is Manifestation.STRAGGLER else ranks
    record = EvidenceRecord(
        step=step,
        surface=surface,
        manifestation=manifestation,
        peers=(0, 1, 2, 3),
        verdict=Verdict(Status.ATTRIBUTED, outliers, times),
    )
    return Incident(
        manifestation=manifestation,
        scope=scope,
        step=step,
        ranks=ranks,
        hosts=hosts,
        records=(record,),
        action=action,
        sentence="Something happened.",
    )


HANG = incident(Manifestation.HANG)
SDC = incident(Manifestation.SDC, action=Action.REPLACE)
SLOW = incident(Manifestation.STRAGGLER, action=Action.INSPECT)


def decided(
    found: Incident, *restarts: Decision, config: RecoveryConfig = CONFIG, has_verified: bool = True
) -> Decision:
    return decide(found, restarts, config, has_verified=has_verified)


@pytest.mark.parametrize(
    ("found", "action", "failure"),
    [
        (HANG, Action.RESTART, Failure.HANG),
        (incident(Manifestation.HANG, action=Action.REPLACE), Action.REPLACE, Failure.MACHINES_GONE),
        (incident(Manifestation.HANG, action=Action.INSPECT), Action.RESTART, Failure.HANG),
        (incident(Manifestation.HANG, scope=Scope.PROCESS_GROUP), Action.RESTART, Failure.HANG),
        (
            incident(Manifestation.HANG, action=Action.INSPECT, scope=Scope.PROCESS_GROUP),
            Action.INSPECT,
            Failure.HANG,
        ),
        (incident(Manifestation.HANG, action=Action.INSPECT, scope=Scope.JOB), Action.INSPECT, Failure.HANG),
        (incident(Manifestation.HANG, scope=Scope.JOB, surface="process"), Action.INSPECT, Failure.OTHER),
        (SDC, Action.REPLACE, Failure.SDC),
        (incident(Manifestation.SDC, scope=Scope.PEER_GROUP, ranks=(0, 1)), Action.REPLACE, Failure.SDC),
        (incident(Manifestation.SDC, scope=Scope.PEER_GROUP, ranks=(0, 1, 2)), Action.INSPECT, Failure.SDC),
        (SLOW, Action.REPLACE, Failure.STRAGGLER),
        (replace(SLOW, scope=Scope.PEER_GROUP), Action.INSPECT, Failure.STRAGGLER),
        (replace(SLOW, scope=Scope.JOB, ranks=()), Action.INSPECT, Failure.STRAGGLER),
        (replace(SLOW, scope=Scope.MACHINE), Action.REPLACE, Failure.STRAGGLER),
        (
            incident(Manifestation.STRAGGLER, surface="time/checkpoint_write"),
            Action.INSPECT,
            Failure.STRAGGLER,
        ),
        (
            incident(Manifestation.NOT_CHECKED, scope=Scope.JOB, ranks=(), hosts=()),
            Action.CONTINUE,
            Failure.OTHER,
        ),
    ],
)
def test_each_kind_of_incident_has_its_answer(found: Incident, action: Action, failure: Failure):
    decision = decided(found)
    assert (decision.action, decision.failure) == (action, failure)
    assert (decision.ranks, decision.hosts, decision.step) == (found.ranks, found.hosts, found.step)
    assert decision.sentence.endswith(".")
    assert not decision.is_carried_out


@pytest.mark.parametrize("manifestation", list(Manifestation))
@pytest.mark.parametrize("scope", [Scope.PEER_GROUP, Scope.PROCESS_GROUP, Scope.JOB])
@pytest.mark.parametrize("ranks", [(), (0, 1, 2), (0, 1, 2, 3)])
def test_nothing_is_done_about_an_inconclusive_incident(
    manifestation: Manifestation, scope: Scope, ranks: tuple[int, ...]
):
    """Also after earlier restarts, and with all permissions: only a disagreeing pair is replaced."""
    found = incident(manifestation, action=Action.INSPECT, scope=scope, ranks=ranks)
    record = replace(found.records[0], verdict=Verdict(Status.INCONCLUSIVE, (), (1.0, 2.0, 3.0, 4.0)))
    found = replace(found, records=(record,))
    allowed = RecoveryConfig(act=("restart", "replace"), max_restarts=1)
    for restarts in ([], [decided(HANG)], [decided(SDC)] * 3):
        for has_verified in (True, False):
            decision = decided(found, *restarts, config=allowed, has_verified=has_verified)
            assert decision.action in (Action.INSPECT, Action.CONTINUE)
            assert not is_allowed(decision, allowed)


def test_sentences_name_machines_ranks_and_the_reason():
    assert decided(SDC).sentence == (
        "Replace machine node-1: rank 2 computed or held wrong numbers (step 40)."
    )
    assert decided(HANG).sentence == "Restart the job in place: rank 2 stopped the job (step 40)."


def test_a_slow_rank_is_kept_while_it_costs_less_than_a_restart():
    slightly = incident(Manifestation.STRAGGLER, times=(10.0, 10.0, 10.02, 10.0))
    decision = decided(slightly)
    assert decision.action is Action.CONTINUE
    assert "less than a restart" in decision.sentence
    patient = RecoveryConfig(restart_seconds=80_000.0)
    assert decided(SLOW, config=patient).action is Action.CONTINUE  # half of a day


def test_a_rank_that_fails_again_after_a_restart_has_its_machine_replaced():
    first = decided(HANG)
    again = decided(replace(HANG, step=90), first)
    assert (again.action, again.failure) == (Action.REPLACE, Failure.HANG)
    assert "rank 2 failed again after a restart" in again.sentence
    other = decided(replace(HANG, step=90, ranks=(3,)), first)
    assert other.action is Action.RESTART


def test_the_same_failure_at_the_same_step_is_never_answered_the_same_way_a_third_time():
    """Whatever the ranks, with and without names of machines."""
    for hosts in [("node-1",), ()]:
        for found in (HANG, SDC, SLOW, replace(HANG, action=Action.REPLACE)):
            answers: list[Decision] = []
            for life in range(8):
                at = replace(found, hosts=hosts, ranks=(life % 4,))
                answers.append(decided(at, *answers, config=RecoveryConfig(max_restarts=100)))
            actions = [each.action for each in answers]
            assert actions[-1] is Action.STOP
            for action in (Action.RESTART, Action.REPLACE):
                assert actions.count(action) <= 2


def test_a_job_that_makes_no_progress_is_stopped():
    restarts = [decided(replace(HANG, step=step, ranks=(rank,))) for rank, step in enumerate((50, 45, 40))]
    decision = decided(replace(HANG, ranks=(3,)), *restarts)
    assert decision.action is Action.STOP
    assert "3 restarts in a row have not brought the job past step 40" in decision.sentence
    assert decided(replace(HANG, ranks=(3,), step=51), *restarts).action is Action.RESTART


def test_corruption_without_a_verified_checkpoint_stops_the_job():
    assert decided(SDC, has_verified=False).action is Action.STOP
    assert decided(HANG, has_verified=False).action is Action.RESTART


@pytest.mark.parametrize(
    ("act", "allowed"),
    [
        ((), set()),
        (("restart",), {Action.RESTART, Action.STOP}),
        (("restart", "replace"), {Action.RESTART, Action.REPLACE, Action.STOP}),
    ],
)
def test_nothing_is_carried_out_without_permission(act: tuple[str, ...], allowed: set[Action]):
    for action in Action:
        is_permitted = is_allowed(replace(decided(HANG), action=action), RecoveryConfig(act=act))
        assert is_permitted is (action in allowed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"act": "restart"}, "act must list some of restart, replace, got 'restart'"),
        ({"act": ["reboot"]}, "act must list some of restart, replace, got 'reboot'"),
        ({"act": ["replace"]}, 'needs "restart" too'),
        ({"max_restarts": 0}, "max_restarts must be at least 1, got 0"),
        ({"restart_seconds": 0}, "restart_seconds must be positive and finite, got 0"),
        ({"horizon_seconds": float("nan")}, "horizon_seconds must be a number, got nan"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        RecoveryConfig(**settings)  # type: ignore[arg-type]
