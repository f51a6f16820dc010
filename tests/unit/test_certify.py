"""What a check is worth to checkpoints: details of ``scenarios/test_gate``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchscout.checkpoint.trust.certification import CheckVote, events_of, outcome_of
from torchscout.checkpoint.trust.gate import CheckpointGate, transition
from torchscout.checkpoint.trust.gate_state import Checked, Outcome, Sealed, WriteFailed
from torchscout.checkpoint.trust.generation import Generation
from torchscout.decision.consensus import exact
from torchscout.decision.repeatability import NONDETERMINISTIC
from torchscout.decision.types import EvidenceRecord, Manifestation
from torchscout.errors import CheckpointError


def number(layer: str, reason: str | None = None) -> EvidenceRecord:
    return EvidenceRecord(
        step=1,
        surface=f"{layer}/output",
        manifestation=Manifestation.SDC,
        peers=(0, 1, 2),
        verdict=None if reason else exact([1, 1, 1]),
        reason=reason,
        layer=layer or None,
    )


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
    left_out = replace(number("layer.0", f"{NONDETERMINISTIC}: atomics"), mode="forward x0.1")
    records = [number(""), number("layer.0"), left_out]
    assert outcome_of(records, [], ("", "layer.0"), require) is outcome


def counted(*ballots: CheckVote) -> CheckVote:
    return CheckVote.counted(
        [max(column) for column in zip(*(each.votes() for each in ballots), strict=True)]
    )


def test_the_outcome_of_the_job_is_the_worst_of_any_rank():
    order = [Outcome.HEALTHY, Outcome.STRAGGLER, Outcome.NOT_CHECKED, Outcome.REJECTED, Outcome.SDC]
    assert {*order} == {*Outcome}
    for worst in order:
        for other in order[: order.index(worst) + 1]:
            assert counted(CheckVote(other, 0), CheckVote(worst, 0), CheckVote(other, 0)).outcome is worst


def test_ranks_in_different_cycles_are_an_error():
    with pytest.raises(CheckpointError, match=r"accepted 1 .* 2"):
        counted(CheckVote(Outcome.HEALTHY, 1), CheckVote(Outcome.HEALTHY, 2))
    assert counted(CheckVote(Outcome.HEALTHY, 2), CheckVote(Outcome.HEALTHY, 2)).accepted == 2


FINE = CheckVote(Outcome.HEALTHY, 0)


def test_a_failed_write_of_one_rank_counts_although_another_one_still_writes():
    gate, _ = transition(CheckpointGate(persist_every=1), Checked(5, Outcome.HEALTHY))
    votes = counted(FINE, replace(FINE, unwritten=True), replace(FINE, writing=True))
    generation = Generation(5)
    expected = [Sealed(generation), WriteFailed(generation), Checked(6, Outcome.HEALTHY)]
    assert events_of(gate, 6, votes) == expected


def test_before_the_first_capture_nothing_can_be_lost():
    gate = CheckpointGate()
    assert events_of(gate, 1, replace(FINE, lost=True)) == [Checked(1, Outcome.HEALTHY)]
