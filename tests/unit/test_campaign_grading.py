"""When a cell of a campaign has passed, and what is said of one that has not."""

from __future__ import annotations

import pytest

from tests.support.incidents import incident_from
from torchscout.campaign.grading import Flaw, Grade, grade, unfired
from torchscout.decision.consensus.rules import exact
from torchscout.decision.records.record import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

SDC, STRAGGLER = Manifestation.SDC, Manifestation.STRAGGLER
TRUTH = GroundTruth(SDC, (9,), Scope.RANK, "blocks.1/output", range(2, 3))


def incident(
    manifestation: Manifestation = SDC,
    ranks: tuple[int, ...] = (9,),
    scope: Scope = Scope.RANK,
    surface: str = "blocks.1/output",
) -> Incident:
    record = EvidenceRecord(
        step=2, surface=surface, manifestation=manifestation, peers=(8, 9, 10), verdict=exact([1, 2, 1])
    )
    return incident_from(record, ranks, scope=scope, action=Action.REPLACE)


def test_a_cell_passes_when_exactly_what_is_wrong_was_reported():
    assert grade([TRUTH], incidents=[incident()]) == Grade()
    assert grade([]).passed
    two = [TRUTH, GroundTruth(STRAGGLER, (3,), Scope.RANK, "time/*", range(2, 3))]
    slow = incident(STRAGGLER, (3,), surface="time/module")
    assert grade(two, incidents=[slow, incident()]).passed, "in whatever order"


def test_a_fault_that_did_not_fire_fails_the_cell_even_with_a_report():
    faults = FaultPlan().flip_bit(rank=9, at="blocks.1/output", step=2, bit=3)
    (missing,) = unfired(faults, [(8, "blocks.1/output"), (9, "blocks.2/output")])
    given = grade([TRUTH], unfired=[missing], incidents=[incident()])
    assert given.flaw is Flaw.NOT_INJECTED
    assert given.reason == "not injected: the fault of rank 9 at blocks.1/output did not happen"
    assert unfired(faults, [(9, "blocks.1/output")]) == []
    # And where a clean cell would pass, one with a fault that did not happen does not.
    assert not grade([], unfired=[missing]).passed


def test_an_unreported_fault_is_missed():
    given = grade([TRUTH])
    assert given.flaw is Flaw.MISSED
    assert given.reason == "nothing was reported of sdc of rank 9 (rank) in blocks.1/output"


@pytest.mark.parametrize(
    ("report", "wrong"),
    [
        (incident(manifestation=STRAGGLER), "manifestation"),
        (incident(ranks=(8,)), "ranks"),
        (incident(ranks=(8, 9)), "ranks"),
        (incident(scope=Scope.MACHINE), "scope"),
        (incident(surface="blocks.2/output"), "surface"),
    ],
)
def test_each_part_of_a_report_must_be_right(report: Incident, wrong: str):
    given = grade([TRUTH], incidents=[report])
    assert given.flaw is Flaw.WRONG_NAME
    assert given.reason.startswith(f"wrong {wrong}: sdc of rank 9 (rank) in blocks.1/output was reported as ")


def test_the_closest_report_is_compared_with_the_ground_truth():
    given = grade([TRUTH], incidents=[incident(STRAGGLER, (1,)), incident(surface="head/output")])
    assert given.reason.startswith("wrong surface: ")


def test_an_additional_report_fails_the_cell():
    given = grade([TRUTH], incidents=[incident(), incident(STRAGGLER, (4,), surface="time/module")])
    assert given.flaw is Flaw.FALSE_ALARM
    assert given.reason == "also reported: straggler of rank 4 (rank) in time/module at step 2"
    twice = grade([TRUTH], incidents=[incident(), incident()])
    assert twice.flaw is Flaw.FALSE_ALARM
    clean = grade([], incidents=[incident()])
    assert (clean.flaw, clean.reason[:9]) == (Flaw.FALSE_ALARM, "reported:")


def test_both_of_two_faults_must_be_reported():
    other = GroundTruth(SDC, (3,), Scope.RANK, "head/output", range(2, 3))
    given = grade([TRUTH, other], incidents=[incident()])
    assert given.flaw is Flaw.WRONG_NAME
    assert given.reason == "nothing was reported of sdc of rank 3 (rank) in head/output"


def test_a_failure_of_torchscout_fails_the_cell():
    given = grade([TRUTH], incidents=[incident()], failures=["ChannelError: gone"])
    assert (given.flaw, given.reason) == (Flaw.BROKEN, "the check itself failed: ChannelError: gone")


def test_the_truth_comes_from_the_faults():
    faults = FaultPlan().flip_bit(rank=9, at="blocks.1/output", step=2, bit=3)
    assert faults.truth(Mesh.grid(replica=16)) == (TRUTH,)
