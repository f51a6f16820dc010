"""What a check is worth to checkpoints, on one rank and job-wide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.incidents import incident_from
from torchscout.checkpoint.trust.certification import CheckVote, events_of, outcome_of
from torchscout.checkpoint.trust.gate import CheckpointGate, transition
from torchscout.checkpoint.trust.gate_state import Checked, Lost, Outcome, Sealed, WriteFailed, Written
from torchscout.checkpoint.trust.generation import Generation
from torchscout.decision.consensus.rules import exact, statistical
from torchscout.decision.records.record import Action, EvidenceRecord, Incident, Manifestation
from torchscout.decision.repeatability import NONDETERMINISTIC, UNDECIDED
from torchscout.decision.sdc import FAILED
from torchscout.errors import CheckpointError

TARGETS = ("", "layer.0")


def number(layer: str, *values: int, reason: str | None = None) -> EvidenceRecord:
    return EvidenceRecord(
        step=1,
        surface=f"{layer}/output",
        manifestation=Manifestation.SDC,
        peers=(0, 1, 2),
        verdict=None if reason else exact(values or (1, 1, 1)),
        reason=reason,
        layer=layer or None,
    )


HEALTHY = [number(""), number("layer.0")]


def slow() -> Incident:
    record = EvidenceRecord(
        step=1,
        surface="time/module",
        manifestation=Manifestation.STRAGGLER,
        peers=(0, 1, 2),
        verdict=statistical([1.0, 1.0, 9.0]),
    )
    return incident_from(record, (2,), action=Action.INSPECT, sentence="Rank 2 is slow.")


@pytest.mark.parametrize(
    ("records", "outcome"),
    [
        (HEALTHY, Outcome.HEALTHY),
        ([*HEALTHY, number("layer.0", reason="no gradient reached it")], Outcome.HEALTHY),
        ([*HEALTHY, number("layer.0", 1, 1, 2)], Outcome.SDC),
        ([*HEALTHY, number("layer.0", 1, 2, 3)], Outcome.SDC),
        ([*HEALTHY, number("layer.0", reason=f"{NONDETERMINISTIC}: atomics")], Outcome.HEALTHY),
        ([number(""), number("layer.0", reason=f"{NONDETERMINISTIC}: atomics")], Outcome.NOT_CHECKED),
        ([*HEALTHY, number("layer.0", reason=f"{UNDECIDED}: rank 1 differed once")], Outcome.REJECTED),
        ([*HEALTHY, number("layer.0", reason=f"{FAILED} on rank 2")], Outcome.NOT_CHECKED),
        ([number(""), number("layer.0", reason="it was not called")], Outcome.NOT_CHECKED),
        ([number("")], Outcome.NOT_CHECKED),
        ([], Outcome.NOT_CHECKED),
    ],
)
def test_outcome_of_a_check_on_one_rank(records: list[EvidenceRecord], outcome: Outcome):
    assert outcome_of(records, [], TARGETS) is outcome


@pytest.mark.parametrize(
    ("require", "outcome"),
    [
        ((), Outcome.HEALTHY),
        (("backward",), Outcome.HEALTHY),
        (("forward",), Outcome.NOT_CHECKED),
        (("layer.*/output",), Outcome.NOT_CHECKED),
        (("layer.1/*", "*/grad_input"), Outcome.HEALTHY),
    ],
)
def test_a_nondeterministic_surface_prevents_certification_only_where_it_is_required(
    require: tuple[str, ...], outcome: Outcome
):
    left_out = replace(number("layer.0", reason=f"{NONDETERMINISTIC}: atomics"), mode="forward x0.1")
    assert outcome_of([*HEALTHY, left_out], [], TARGETS, require) is outcome


def test_a_straggler_is_an_accepted_outcome():
    outcome = outcome_of([*HEALTHY, slow().records[0]], [slow()], TARGETS)
    assert outcome is Outcome.STRAGGLER
    assert outcome.accepted
    # A time that differs is no wrong number, and one round of it is no incident.
    assert outcome_of([*HEALTHY, slow().records[0]], [], TARGETS) is Outcome.HEALTHY


def counted(*ballots: CheckVote) -> CheckVote:
    return CheckVote.counted(
        [max(column) for column in zip(*(each.votes() for each in ballots), strict=True)]
    )


@pytest.mark.parametrize("worst", list(Outcome))
def test_the_outcome_of_the_job_is_the_worst_of_any_rank(worst: Outcome):
    order = [Outcome.HEALTHY, Outcome.STRAGGLER, Outcome.NOT_CHECKED, Outcome.REJECTED, Outcome.SDC]
    for other in order[: order.index(worst) + 1]:
        assert counted(CheckVote(other, 0), CheckVote(worst, 0), CheckVote(other, 0)).outcome is worst


def test_ranks_in_different_cycles_are_an_error_without_events():
    with pytest.raises(CheckpointError, match="some have accepted 1 of its checks, others 2; no checkpoint"):
        counted(CheckVote(Outcome.HEALTHY, 1), CheckVote(Outcome.HEALTHY, 2))
    assert counted(CheckVote(Outcome.HEALTHY, 2), CheckVote(Outcome.HEALTHY, 2)).accepted == 2


FINE = CheckVote(Outcome.HEALTHY, 0)


def written_at(step: int) -> CheckpointGate:
    """A dense job that has begun to write what it captured."""
    gate, effects = transition(CheckpointGate(persist_every=1), Checked(step, Outcome.HEALTHY))
    assert effects.persist == Generation(step)
    return gate


def test_files_count_as_written_once_every_rank_has_sealed_them():
    gate = written_at(5)
    late = replace(FINE, writing=True)
    sealed, checked = Sealed(Generation(5)), Checked(6, Outcome.HEALTHY)
    assert events_of(gate, 6, counted(FINE, late)) == [sealed, checked]
    assert events_of(gate, 6, counted(FINE, FINE)) == [sealed, Written(Generation(5)), checked]


def test_one_failed_write_fails_the_write_of_all_ranks():
    failed = replace(FINE, unwritten=True)
    events = events_of(written_at(5), 6, counted(FINE, failed, replace(FINE, writing=True)))
    assert events == [Sealed(Generation(5)), WriteFailed(Generation(5)), Checked(6, Outcome.HEALTHY)]


def test_a_capture_that_failed_on_one_rank_is_lost_to_all():
    gate = written_at(5)
    events = events_of(gate, 6, counted(FINE, replace(FINE, lost=True, writing=True)))
    assert events == [Lost(Generation(5)), Checked(6, Outcome.HEALTHY)]
    gate, _ = transition(gate, events[0])
    assert (gate.latest, gate.verified, gate.writing) == (None, None, None)


def test_before_the_first_capture_nothing_can_be_lost():
    gate = CheckpointGate()
    assert events_of(gate, 1, replace(FINE, lost=True)) == [Checked(1, Outcome.HEALTHY)]
