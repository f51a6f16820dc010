"""The recovery policy as tables, and incidents for tests of what carries out decisions.

What is decided about jobs that fail again and again is in ``scenarios/test_policy``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from torchscout.config import RecoveryConfig
from torchscout.decision.consensus import Status, Verdict
from torchscout.decision.policy import decide, is_allowed, step_slowdown
from torchscout.decision.types import (
    Action,
    Decision,
    EvidenceRecord,
    Failure,
    Incident,
    Manifestation,
    Scope,
)


def incident(
    manifestation: Manifestation,
    *,
    action: Action = Action.RESTART,
    scope: Scope = Scope.RANK,
    hosts: tuple[str, ...] = ("node-1",),
    step: int = 40,
) -> Incident:
    """About rank 2."""
    record = EvidenceRecord(
        step=step,
        surface="coordinate",
        manifestation=manifestation,
        peers=(0, 1, 2, 3),
        verdict=Verdict(Status.ATTRIBUTED, (2,), (10.0, 10.0, 20.0, 10.0)),
    )
    return Incident(
        manifestation=manifestation,
        scope=scope,
        step=record.step,
        ranks=(2,),
        hosts=hosts,
        records=(record,),
        action=action,
        sentence="Something happened.",
    )


HANG = incident(Manifestation.HANG)
SDC = incident(Manifestation.SDC, action=Action.REPLACE)
UNDECIDED = replace(HANG, scope=Scope.PROCESS_GROUP, hosts=("node-1", "node-2"))
ALL = RecoveryConfig(act=("restart", "replace"))


def decided(found: Incident, *restarts: Decision, **more: float) -> Decision:
    return decide(found, restarts, ALL, has_verified=True, **more)


AGREED = {
    # What the incident calls for: what is done if restarts are permitted, and if all is.
    Action.CONTINUE: (None, None),
    Action.INSPECT: (None, None),
    Action.RESTART: (Action.RESTART, Action.RESTART),
    Action.PREFLIGHT: (Action.RESTART, Action.PREFLIGHT),
    Action.REPLACE: (Action.RESTART, Action.REPLACE),
    Action.STOP: (Action.STOP, Action.STOP),
}
NOT_SLOW = [each for each in Manifestation if each is not Manifestation.STRAGGLER]


def test_the_decision_agrees_with_the_incident_as_far_as_is_permitted():
    for kind, scope, action in product(NOT_SLOW, Scope, Action):
        restarts, everything = AGREED[action]
        if action is Action.REPLACE and scope not in (Scope.RANK, Scope.MACHINE):
            everything = Action.PREFLIGHT  # nobody is replaced who is not named
        found = incident(kind, action=action, scope=scope)
        if scope not in (Scope.RANK, Scope.MACHINE):
            undecided = replace(found.records[0], verdict=Verdict(Status.INCONCLUSIVE, (), (1, 2, 3, 4)))
            found = replace(found, records=(undecided,))
        for act, wanted in (((), everything), (("restart",), restarts), (("restart", "replace"), everything)):
            config = RecoveryConfig(act=act)
            decision = decide(found, (), config, has_verified=True)
            assert decision.action is (wanted or action), decision
            assert is_allowed(decision, config) == (bool(act) and wanted is not None)


@pytest.mark.parametrize(
    ("scope", "surface", "slowdown", "action"),
    [
        (Scope.RANK, "time/module", 1.5, Action.REPLACE),
        (Scope.MACHINE, "time/all_reduce", 1.5, Action.REPLACE),
        (Scope.RANK, "time/optimizer", 1.004, Action.REPLACE),
        (Scope.RANK, "time/module", 1.003, Action.CONTINUE),
        (Scope.RANK, "time/module", 1.0, Action.CONTINUE),
        (Scope.RANK, "time/module", None, Action.INSPECT),
        (Scope.RANK, "time/input", 1.5, Action.INSPECT),
        (Scope.RANK, "time/checkpoint_read", 1.5, Action.INSPECT),
        (Scope.PEER_GROUP, "time/module", 1.5, Action.INSPECT),
        (Scope.PROCESS_GROUP, "time/all_reduce", 1.5, Action.INSPECT),
        (Scope.JOB, "time/all_reduce", 1.5, Action.INSPECT),
    ],
)
def test_a_slow_rank_is_replaced_if_its_machine_costs_more_than_a_restart(
    scope: Scope, surface: str, slowdown: float | None, action: Action
):
    found = incident(Manifestation.STRAGGLER, scope=scope, action=Action.INSPECT)
    record = replace(found.records[0], surface=surface)
    found = replace(found, records=(record,), slowdown=slowdown)
    for act in ((), ("restart",), ("restart", "replace")):
        config = RecoveryConfig(act=act)
        decision = decide(found, (), config, has_verified=True)
        assert decision.action is action, decision
        assert is_allowed(decision, config) == ("replace" in act and action is Action.REPLACE)


BEFORE = [(step, 100.0 + step % 3) for step in range(20)]
SLOW = replace(incident(Manifestation.STRAGGLER, step=20), ranks=(2,))


@pytest.mark.parametrize(
    ("steps", "least", "most"),
    [
        ([*BEFORE, (20, 120.0), *((step, 150.0) for step in range(21, 25))], 1.45, 1.5),
        ([*BEFORE, *((step, 101.0 + step % 2) for step in range(21, 25))], 1.0, 1.0),  # as it varies anyway
        ([*BEFORE, (21, 90.0)], 1.0, 1.0),
        # Slow from the start: the work that was compared takes 10 ms longer than on the peers.
        ([(step, 110.0) for step in range(21, 25)], 1.1, 1.1),
        ([(20, 5.0)], 10.0, 10.0),
        ([(10, 110.0), (21, 110.0)], 1.1, 1.1),
    ],
)
def test_the_cost_of_a_slow_rank_is_seen_in_the_steps_of_the_job(
    steps: list[tuple[int, float]], least: float, most: float
):
    found = step_slowdown(SLOW, steps)
    assert found is not None
    assert least <= round(found, 6) <= most


def test_without_steps_it_is_not_known_what_a_slow_rank_costs():
    assert step_slowdown(SLOW, []) is None


@pytest.mark.parametrize(
    ("found", "failure"),
    [
        (HANG, Failure.HANG),
        (replace(HANG, action=Action.REPLACE, scope=Scope.MACHINE), Failure.MACHINES_GONE),
        (incident(Manifestation.CRASH), Failure.OTHER),
        (SDC, Failure.SDC),
        (incident(Manifestation.STRAGGLER), Failure.STRAGGLER),
    ],
)
def test_the_failure_says_which_checkpoint_can_be_trusted(found: Incident, failure: Failure):
    assert decided(found).failure is failure


def test_a_decision_names_what_it_is_about_and_why():
    decision = decided(SDC, seconds=7.0)
    assert (decision.ranks, decision.hosts, decision.step) == (SDC.ranks, SDC.hosts, SDC.step)
    assert (decision.scope, decision.seconds, decision.is_carried_out) == (SDC.scope, 7.0, False)
    for fact in ("node-1", "rank 2", "step 40"):
        assert fact in decision.sentence


DAY = 86_400.0


@pytest.mark.parametrize(
    ("step", "seconds", "action"),
    [
        (41, 0.0, Action.REPLACE),
        (50_040, DAY, Action.REPLACE),
        (50_041, DAY, Action.RESTART),
        (41, DAY + 1, Action.RESTART),
    ],
)
def test_a_machine_is_replaced_if_it_fails_again_soon(step: int, seconds: float, action: Action):
    assert decided(replace(HANG, step=step), decided(HANG), seconds=seconds).action is action


def test_the_training_time_of_all_lives_in_between_counts():
    other = decided(replace(HANG, step=50, hosts=("node-2",)), decided(HANG), seconds=0.6 * DAY)
    again = decided(replace(HANG, step=60), decided(HANG), other, seconds=0.6 * DAY)
    assert again.action is Action.RESTART


def test_of_several_named_machines_only_those_that_failed_before_are_replaced():
    found = replace(HANG, ranks=(2, 3), hosts=("node-1", "node-2"), step=60)
    decision = decided(found, decided(HANG))
    assert (decision.action, decision.hosts) == (Action.REPLACE, ("node-1",))
    assert decided(found, decided(UNDECIDED)).action is Action.RESTART, "nobody was named"


def test_undecided_incidents_end_in_a_stop_though_the_job_makes_progress():
    lives: list[Decision] = []
    for step in range(100, 500, 100):
        lives.append(decided(replace(UNDECIDED, step=step), *lives, seconds=60.0))
    assert [each.action for each in lives] == [Action.RESTART] * 3 + [Action.STOP]
    later = decided(replace(UNDECIDED, step=60_000), *lives[:3], seconds=60.0)
    assert later.action is Action.RESTART, "these were long ago"
    assert decided(replace(HANG, step=400), *lives[:3]).action is Action.RESTART, "somebody is named"


def test_without_names_of_machines_the_same_answer_is_not_given_a_third_time_either():
    patient = RecoveryConfig(max_restarts=100)
    for found in (HANG, SDC):
        answers: list[Decision] = []
        for life in range(3):
            nameless = replace(found, hosts=(), ranks=(life % 4,))
            answers.append(decide(nameless, answers, patient, has_verified=True))
        assert [each.action for each in answers] == [found.action, found.action, Action.STOP]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"act": "restart"}, "act .* restart, replace, got 'restart'"),
        ({"act": ["reboot"]}, "act .* restart, replace, got 'reboot'"),
        ({"act": ["replace"]}, 'needs "restart" too'),
        ({"max_restarts": 0}, "max_restarts .* got 0"),
        ({"restart_seconds": 0}, "restart_seconds .* got 0"),
        ({"horizon_seconds": float("nan")}, "horizon_seconds .* got nan"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        RecoveryConfig(**settings)  # type: ignore[arg-type]
