"""The recovery policy: its settings, and incidents for tests of what carries out decisions.

What is decided about each kind of incident is in ``scenarios/test_policy``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from torchscout.config import RecoveryConfig
from torchscout.decision.consensus import Status, Verdict
from torchscout.decision.recovery.policy import decide, is_allowed
from torchscout.decision.types import (
    Action,
    Decision,
    EvidenceRecord,
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


def decided(found: Incident, *restarts: Decision) -> Decision:
    return decide(found, restarts, RecoveryConfig(), has_verified=True)


def test_checks_that_have_stopped_do_not_affect_training():
    assert decided(incident(Manifestation.NOT_CHECKED)).action is Action.CONTINUE


def test_without_names_of_machines_the_same_answer_is_not_given_a_third_time_either():
    patient = RecoveryConfig(max_restarts=100)
    for found in (HANG, SDC):
        answers: list[Decision] = []
        for life in range(8):
            nameless = replace(found, hosts=(), ranks=(life % 4,))
            answers.append(decide(nameless, answers, patient, has_verified=True))
        actions = [each.action for each in answers]
        assert actions[-1] is Action.STOP
        assert max(actions.count(Action.RESTART), actions.count(Action.REPLACE)) <= 2


def test_nothing_is_done_about_an_undecided_incident_whatever_was_done_before():
    undecided = Verdict(Status.INCONCLUSIVE, (), (1.0, 2.0, 3.0, 4.0))
    allowed = RecoveryConfig(act=("restart", "replace"), max_restarts=1)
    scopes = (Scope.PEER_GROUP, Scope.PROCESS_GROUP, Scope.JOB)
    sets = ((), (0, 1, 2), (0, 1, 2, 3))  # two that disagree are replaced
    before = ([], [decided(HANG)], [decided(SDC)] * 3)
    for kind, scope, ranks, restarts, has in product(Manifestation, scopes, sets, before, (True, False)):
        found = incident(kind, action=Action.INSPECT, scope=scope)
        records = (replace(found.records[0], verdict=undecided),)
        found = replace(found, ranks=ranks, records=records)
        assert not is_allowed(decide(found, restarts, allowed, has_verified=has), allowed), found


def test_a_decision_names_what_it_is_about_and_why():
    decision = decided(SDC)
    assert (decision.ranks, decision.hosts, decision.step) == (SDC.ranks, SDC.hosts, SDC.step)
    for fact in ("node-1", "rank 2", "step 40"):
        assert fact in decision.sentence
    assert not decision.is_carried_out


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
