"""When a cell of a campaign has passed, and what is said of one that has not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.incidents import incident_from
from torchscout.campaign.cells.cell import Cell
from torchscout.campaign.cells.moe import MoeRankResult, in_its_turn
from torchscout.campaign.cells.paper_cells import Turns
from torchscout.campaign.cells.recovery import STEPS, Counter, RecoveryRankResult, recovered
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


CORRUPTED = [RecoveryRankResult([], [], 3, 0, {1: "a", 2: f"b{rank}", 3: "spoilt"}) for rank in range(2)]
RESUMED = [
    RecoveryRankResult([], [], None, 2, {2: f"b{rank}", 3: "c", 4: "d", STEPS: "e"}) for rank in range(2)
]


def test_a_job_that_goes_on_from_the_step_before_is_recovered():
    assert recovered(3, CORRUPTED, RESUMED) == Grade()


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ({"poisoned": 4}, {}, "checkpoints are poisoned at step ['3', '4'], not at 3"),
        ({"poisoned": None}, {}, "checkpoints are poisoned at step ['3', 'None'], not at 3"),
        ({}, {"resumed": 3}, "ranks resumed from step [2, 3], not from 2"),
        ({}, {"digests": {2: "b0", STEPS: "e"}}, "rank 1 has other bits than after step 2"),
        ({}, {"digests": {2: "b1", 3: "c"}}, f"rank 1 reached step 3, not {STEPS}"),
    ],
)
def test_one_rank_that_differs_is_enough_to_fail(before: dict, after: dict, reason: str):
    first = [CORRUPTED[0], replace(CORRUPTED[1], **before)]
    second = [RESUMED[0], replace(RESUMED[1], **after)]
    assert recovered(3, first, second) == Grade(Flaw.NOT_RECOVERED, reason)


def test_the_callers_own_state_is_restored():
    counter, other = Counter(), Counter()
    for _ in range(3):
        counter.draw()
    other.load_state_dict(counter.state_dict())
    counter.draw()
    other.draw()
    assert other.state_dict() == counter.state_dict()


TURNS = Turns((128, 512), 2)
FAULTY = Cell("r", "n", "ep4", faults=FaultPlan().flip_bit(rank=15, at="layer.0/w", step=4, bit=3))
CLEAN = Cell("r", "n", "ep4")
TOLD = [MoeRankResult([], [], 1, 0)] * 3


def found(step: int, layer: str) -> Incident:
    record = EvidenceRecord(
        step=step,
        surface="s",
        manifestation=SDC,
        peers=(3, 7, 15),
        verdict=exact([1, 1, 2]),
        layer=layer,
    )
    return incident_from(record, (15,), action=Action.REPLACE)


def test_a_fault_that_is_found_when_its_shape_is_due_passes():
    assert TURNS.second(512) == 4
    right = found(4, "layer.0.mixture.experts x512")
    assert in_its_turn(FAULTY, TOLD, [right], TURNS) == Grade()
    assert in_its_turn(CLEAN, [replace(each, cycles=3) for each in TOLD], [], TURNS) == Grade()


@pytest.mark.parametrize(
    ("step", "layer"),
    [
        (5, "layer.0.mixture.experts x512"),
        (4, "layer.0.mixture.experts x128"),
        (4, "layer.1.mixture.experts x512"),
    ],
)
def test_a_fault_that_is_found_at_another_step_shape_or_layer_fails(step: int, layer: str):
    given = in_its_turn(FAULTY, TOLD, [found(step, layer)], TURNS)
    seen = f"found at {layer} after step {step}, not at layer.0.mixture.experts x512 after step 4"
    assert given == Grade(Flaw.WRONG_NAME, seen)


@pytest.mark.parametrize(("cell", "cycles"), [(FAULTY, 0), (FAULTY, 2), (CLEAN, 1)])
def test_a_cycle_that_is_missing_on_one_rank_proves_nothing(cell: Cell, cycles: int):
    seen = [
        *(replace(each, cycles=1 if cell.faults else 3) for each in TOLD),
        MoeRankResult([], [], cycles, 0),
    ]
    assert in_its_turn(cell, seen, [], TURNS).flaw is Flaw.BROKEN
