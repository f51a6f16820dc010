"""When a fault in a mixture of experts counts as found: after a clean cycle, at the shape that is due."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchscout.campaign.cells.cell import Cell
from torchscout.campaign.cells.moe import MoeRankResult, in_its_turn
from torchscout.campaign.cells.paper_cells import Turns
from torchscout.campaign.grading import Flaw, Grade
from torchscout.decision.consensus.rules import exact
from torchscout.decision.records.record import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.faults.plan import FaultPlan

TURNS = Turns((128, 512), 2)
FAULTY = Cell("r", "n", "ep4", faults=FaultPlan().flip_bit(rank=15, at="layer.0/w", step=4, bit=3))
CLEAN = Cell("r", "n", "ep4")
TOLD = [MoeRankResult([], [], 1, 0)] * 3


def found(step: int, layer: str) -> Incident:
    record = EvidenceRecord(
        step=step,
        surface="s",
        manifestation=Manifestation.SDC,
        peers=(3, 7, 15),
        verdict=exact([1, 1, 2]),
        layer=layer,
    )
    return Incident(
        manifestation=Manifestation.SDC,
        scope=Scope.RANK,
        step=step,
        ranks=(15,),
        hosts=(),
        records=(record,),
        action=Action.REPLACE,
        sentence="seen",
    )


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
def test_another_step_shape_or_layer_does_not(step: int, layer: str):
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
