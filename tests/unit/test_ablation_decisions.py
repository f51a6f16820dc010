"""Decisions that lack a piece of the method: what they get wrong is what the piece is for."""

from __future__ import annotations

import pytest

from torchscout.campaign.ablation.variants import (
    Claim,
    Outcome,
    RawStepTimes,
    coordinate_vote,
    first_to_differ,
    first_to_time_out,
    judged,
    unconfirmed,
)
from torchscout.config import StragglerConfig
from torchscout.decision.consensus.rules import Verdict, exact, statistical
from torchscout.decision.progress import Phase, Process, Progress, RankStatus
from torchscout.decision.records.record import EvidenceRecord, Manifestation, Scope
from torchscout.decision.records.recorder import Stamped
from torchscout.faults.ground_truth import GroundTruth
from torchscout.mesh import Mesh

SDC, STRAGGLER, HANG = Manifestation.SDC, Manifestation.STRAGGLER, Manifestation.HANG
CONFIG = StragglerConfig().on_host()
TRUTH = GroundTruth(SDC, (9,), Scope.RANK, "head/output", range(2, 3))
RIGHT, OTHER = Claim(SDC, (9,)), Claim(SDC, (8,))


def evidence(surface: str, kind: Manifestation, verdict: Verdict) -> EvidenceRecord:
    return EvidenceRecord(step=2, surface=surface, manifestation=kind, peers=(0, 1, 2, 3), verdict=verdict)


def numbers(*values: int) -> EvidenceRecord:
    return evidence("head/output", SDC, exact(list(values)))


def times(*values: float, surface: str = "time/module") -> EvidenceRecord:
    return evidence(surface, STRAGGLER, statistical(list(values)))


def standing(rank: int, operation: int, *, waits: bool, silent: float) -> RankStatus:
    progress = Progress(rank, 4, operation, Phase.BACKWARD, {}, (), waits, silent)
    return RankStatus(rank, Process.RUNNING, progress)


@pytest.mark.parametrize(
    ("truths", "claims", "outcome"),
    [
        ([TRUTH], {RIGHT}, Outcome.RIGHT),
        ([TRUTH], {OTHER}, Outcome.WRONG),
        ([TRUTH], {RIGHT, OTHER}, Outcome.WRONG),
        ([TRUTH], {Claim(STRAGGLER, (9,))}, Outcome.WRONG),
        ([TRUTH], set(), Outcome.MISSED),
        ([], set(), Outcome.RIGHT),
        ([], {RIGHT}, Outcome.FALSE_ALARM),
    ],
)
def test_claims_are_compared_with_the_ground_truth(
    truths: list[GroundTruth], claims: set[Claim], outcome: Outcome
):
    assert judged(truths, claims) is outcome


def test_without_a_vote_the_first_rank_to_report_or_to_time_out_is_blamed():
    written = {
        rank: [Stamped(numbers(1, 2, 1, 1), 0, when)] for rank, when in enumerate((5.2, 5.3, 5.1, 5.4))
    }
    assert first_to_differ(written) == {Claim(SDC, (2,))}
    assert first_to_differ({0: [Stamped(numbers(1, 1, 1, 1), 0, 1.0)]}) == set()
    late = standing(1, 3, waits=False, silent=9.0)
    victims = [standing(0, 7, waits=True, silent=3.0), standing(2, 7, waits=True, silent=4.0)]
    assert first_to_time_out([late, *victims]) == {Claim(HANG, (2,))}
    assert first_to_time_out([late]) == set(), "who has not entered a collective does not time out in it"


def test_without_confirmation_one_round_is_enough():
    records = [numbers(1, 2, 1, 1), times(4.0, 4.1, 260.0, 4.2), times(4.0, 9.0, 4.1, 4.0)]
    assert unconfirmed(records, CONFIG) == {Claim(SDC, (1,)), Claim(STRAGGLER, (2,))}
    assert unconfirmed([times(4.0, 4.1, 260.0, 4.2, surface="time/all_reduce")], CONFIG) == set()


def test_raw_step_times_show_a_slow_rank_only_where_nobody_waits_for_it():
    mesh = Mesh.grid(replica=4)
    alone, together = RawStepTimes(mesh, CONFIG), RawStepTimes(mesh, CONFIG)
    found = [alone.observe(step, [0.01, 0.01, 0.3, 0.01]) for step in range(1, 4)]
    assert set().union(*found) == {Claim(STRAGGLER, (2,))}
    assert found[0] == set(), "confirmed as replayed layers are"
    assert not any(together.observe(step, [0.3, 0.31, 0.3, 0.32]) for step in range(1, 6))


def test_without_the_wait_graph_victims_are_blamed_with_the_one_they_wait_for():
    mesh = Mesh.grid(replica=3, tensor=2)
    # Rank 3 is late; its tensor-parallel partner waits for it, and all others wait for those two further on.
    where = {0: 9, 1: 9, 2: 5, 3: 4, 4: 9, 5: 9}
    standings = [standing(rank, where[rank], waits=rank != 3, silent=1.0) for rank in where]
    assert coordinate_vote(standings, mesh) == {Claim(HANG, (2, 3))}
