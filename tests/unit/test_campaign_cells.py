"""The cells of the campaigns, how they are chosen, and when in a long training each has its turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from torchscout.campaign.ablation.variants import ablation_cells, pieces_for
from torchscout.campaign.campaigns import PAPER, chosen, sampled
from torchscout.campaign.cells.cell import ROWS, Cell
from torchscout.campaign.cells.paper_cells import SHAPES, WORK, Turns, paper_cells
from torchscout.campaign.cells.warm import WARMUP, planned, scheduled
from torchscout.decision.records.record import Manifestation, Scope
from torchscout.faults.plan import FaultPlan
from torchscout.testing.moe_model import LAYERS, MoeTransformer
from torchscout.testing.transformer import TINY, Transformer

CELLS = paper_cells(0)


def test_the_papers_rows_have_the_papers_cells():
    assert Counter(cell.row for cell in CELLS) == {
        "dense-sdc": 3,
        "numerical-sdc": 344,
        "numerical-clean": 30,
        "compute-straggler": 3,
        "communication-straggler": 1,
        "moe-sdc": 2,
        "moe-clean": 1,
        "moe-kernel": 4,
        "hang": 120,
        "hang-clean": 30,
    }
    low = [cell for cell in CELLS if cell.name.rpartition("/")[2] in {"bit-0", "bit-1", "bit-2", "bit-3"}]
    assert len(low) == 64
    assert {cell.row for cell in CELLS} == {row.key for row in ROWS}


def test_a_cell_is_known_by_its_identity_in_every_run():
    identities = [cell.identity for cell in CELLS]
    assert len(set(identities)) == len(identities)
    assert identities == [cell.identity for cell in paper_cells(0)]
    changed = [cell.identity for cell in paper_cells(1)]
    assert set(identities).isdisjoint(changed), "another seed injects something else"
    cell = CELLS[0]
    other = replace(cell, faults=FaultPlan().flip_bit(rank=1, at="head/output", step=2, bit=1))
    assert other.identity != cell.identity


def test_every_fault_can_happen_in_what_is_trained():
    dense, mixture = Transformer(), MoeTransformer()
    for cell in [*CELLS, *ablation_cells(0)]:
        cell.faults.check(cell.place.mesh(), mixture if cell.place.experts > 1 else dense)


def test_the_truths_are_those_of_the_paper():
    slow = {cell.layout: cell for cell in CELLS if cell.row.endswith("straggler")}
    for layout in ("ddp", "fsdp2", "hsdp"):
        (truth,) = slow[layout].truths
        assert (truth.manifestation, truth.ranks, truth.scope) == (Manifestation.STRAGGLER, (9,), Scope.RANK)
    (truth,) = slow["tensor"].truths
    assert (truth.ranks, truth.scope) == ((14, 15), Scope.PROCESS_GROUP)
    wrong = {cell.name: cell for cell in CELLS if cell.row == "moe-sdc"}
    assert {cell.place.ranks for cell in wrong.values()} == {16}
    for cell in wrong.values():
        (truth,) = cell.truths
        assert (truth.ranks, truth.scope) == ((15,), Scope.RANK)
        assert truth.surface == "layer.0.mixture.experts/parameters"
    persistent = {cell.place.ranks: cell for cell in CELLS if cell.name == "persistent"}
    assert {ranks: cell.truths[0].ranks for ranks, cell in persistent.items()} == {8: (7,), 16: (15,)}
    quiet = [cell for cell in CELLS if cell.row.endswith("clean") or cell.name.startswith(WORK)]
    assert {cell.truths for cell in quiet} == {()}
    assert all(len(cell.truths) == 1 for cell in CELLS if cell not in quiet)


def test_a_wrong_weight_comes_after_a_clean_cycle_when_its_shape_is_due():
    turns = Turns(SHAPES, LAYERS)
    due = {}
    for cell in CELLS:
        if cell.row == "moe-sdc":
            (fault,) = cell.faults
            assert fault.steps[0] > len(turns)
            due[cell.name] = turns.target(fault.steps[0])
    assert due == {
        "rows-128": "layer.0.mixture.experts x128",
        "rows-512": "layer.0.mixture.experts x512",
    }


def test_every_cell_has_a_clean_step_before_and_after_and_finds_replay_at_its_layer():
    cells = [cell for cell in CELLS if cell.layout == "hsdp" and cell.row != "dense-sdc"]
    slots = scheduled(cells, TINY.layers)
    assert {slot.cell for slot in slots} == set(cells)
    assert len(slots) == len(cells)
    faulty: set[int] = set()
    for before, slot in zip([None, *slots], slots, strict=False):
        assert slot.first == (1 if before is None else before.last + 1)
        steps = {step for fault in slot.faults for step in fault.steps}
        assert slot.first <= min(steps, default=slot.first)
        assert max(steps, default=0) < slot.last
        assert min(steps, default=WARMUP + 1) > WARMUP
        if slot.cell.due is not None:
            assert {(step - 1) % TINY.layers for step in steps} == {slot.cell.due}
        assert slot.restored_after in {None, *steps}
        assert not {step - 1 for step in steps} & faulty - steps, "the step before is another cell's fault"
        faulty |= steps
    assert sum(len(slot.faults) for slot in slots) == len(planned(slots))


def test_state_that_a_fault_changed_is_restored_before_the_next_cell():
    state = Cell("r", "state", "ddp", faults=FaultPlan().flip_bit(rank=1, at="head/weight", step=2, bit=3))
    output = Cell("r", "output", "ddp", faults=FaultPlan().flip_bit(rank=1, at="head/output", step=2, bit=3))
    first, second = scheduled([state, output], TINY.layers)
    assert first.restored_after == WARMUP + 1
    assert second.restored_after is None


def test_cells_are_chosen_by_pattern():
    def count(pattern: str) -> int:
        return len(chosen(CELLS, ROWS, pattern))

    assert count("*") == len(CELLS)
    assert count("hang") == 120
    assert count("numerical-sdc/fsdp2") == 60
    assert count("hang*/*/*-0") == 5
    assert count("numerical-sdc/ddp/head/output/bit-0") == 1
    assert count(CELLS[7].identity) == 1


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no cell matches 'hangs'.* the rows are dense-sdc, "):
        chosen(CELLS, ROWS, "hangs")


def test_a_quick_run_has_some_of_every_row():
    quick = sampled(CELLS, 0, PAPER.sample)
    assert {cell.row for cell in quick} == {cell.row for cell in CELLS}
    assert len(quick) < 30
    assert quick == sampled(CELLS, 0, PAPER.sample)
    assert quick != sampled(CELLS, 1, PAPER.sample)


def test_every_row_of_the_ablation_has_to_do_with_some_piece():
    cells = ablation_cells(0)
    assert len({cell.identity for cell in cells}) == len(cells)
    assert all(pieces_for(cell.row) for cell in cells)
    assert {cell.row for cell in cells if cell.benign} == {"nondeterminism", "transient"}
    assert all(cell.truths == () for cell in cells if cell.benign)
