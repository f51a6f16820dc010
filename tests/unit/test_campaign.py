"""The campaigns of faults: which cells they have, when one has passed, and what is kept of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.incidents import incident_from
from torchscout.campaign.ablation.variants import ablation_cells
from torchscout.campaign.campaigns import PAPER, chosen, paper_on, sampled
from torchscout.campaign.cells.cell import ROWS, Cell, Hardware
from torchscout.campaign.cells.moe import MoeRankResult, in_its_turn
from torchscout.campaign.cells.paper_cells import SHAPES, WORK, Turns, paper_cells
from torchscout.campaign.cells.recovery import STEPS, RecoveryRankResult, recovered
from torchscout.campaign.cells.training import retried
from torchscout.campaign.cells.warm import WARMUP, planned, scheduled
from torchscout.campaign.grading import Flaw, Grade, grade, unfired
from torchscout.campaign.machine import fitted
from torchscout.campaign.page import page
from torchscout.campaign.results import Found, Result, Store, as_report, interval, percentile, summarized
from torchscout.campaign.tables import screen_of
from torchscout.decision.consensus import exact
from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.faults.effects import DeviceSpin, Sleep
from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import FaultPlan
from torchscout.testing.local_ranks import RankError
from torchscout.testing.moe_model import LAYERS, MoeTransformer
from torchscout.testing.transformer import TINY, Transformer

SDC, STRAGGLER = Manifestation.SDC, Manifestation.STRAGGLER
CELLS = paper_cells(0)
CUDA = Hardware("cuda", "nccl", 4)
FAULT = FaultPlan().flip_bit(rank=9, at="blocks.1/output", step=2, bit=3)
TRUTH = GroundTruth(SDC, (9,), Scope.RANK, "blocks.1/output", range(2, 3))
SLOW = GroundTruth(STRAGGLER, (3,), Scope.RANK, "time/*", range(2, 3))


def on_cuda() -> list[Cell]:
    cells, skipped = fitted(paper_on(CUDA).cells(0), CUDA)
    assert skipped == []
    return cells


def incident(
    manifestation: Manifestation = SDC,
    ranks: tuple[int, ...] = (9,),
    scope: Scope = Scope.RANK,
    surface: str = "blocks.1/output",
    step: int = 2,
    layer: str | None = None,
) -> Incident:
    record = EvidenceRecord(
        step=step,
        surface=surface,
        manifestation=manifestation,
        peers=(8, 9, 10),
        verdict=exact([1, 2, 1]),
        layer=layer,
    )
    return incident_from(record, ranks, scope=scope, action=Action.REPLACE)


# Cells


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
    quiet = [cell for cell in CELLS if cell.row.endswith("clean") or cell.name.startswith(WORK)]
    assert all(len(cell.truths) == (cell not in quiet) for cell in CELLS)


def test_a_cell_is_known_by_its_identity_in_every_run():
    identities = [cell.identity for cell in CELLS]
    assert len(set(identities)) == len(identities)
    assert identities == [cell.identity for cell in paper_cells(0)]
    assert set(identities).isdisjoint(cell.identity for cell in paper_cells(1))
    assert set(identities).isdisjoint(cell.identity for cell in on_cuda())


def test_every_fault_can_happen_in_what_is_trained():
    dense, mixture = Transformer(), MoeTransformer()
    for cell in [*CELLS, *ablation_cells(0), *on_cuda()]:
        has_experts = cell.place.experts > 1 or cell.row.startswith("moe")
        cell.faults.check(cell.place.mesh(), mixture if has_experts else dense)


def test_a_wrong_weight_comes_after_a_clean_cycle_when_its_shape_is_due():
    turns = Turns(SHAPES, LAYERS)
    for cell in CELLS:
        if cell.row == "moe-sdc":
            (fault,) = cell.faults
            assert fault.steps[0] > len(turns)
            assert turns.target(fault.steps[0]) == f"layer.0.mixture.experts x{cell.name[len('rows-') :]}"


def test_every_cell_has_a_clean_step_before_and_after_and_finds_replay_at_its_layer():
    cells = [cell for cell in CELLS if cell.layout == "hsdp" and cell.row != "dense-sdc"]
    slots = scheduled(cells, TINY.layers)
    assert {slot.cell for slot in slots} == set(cells)
    faulty: set[int] = set()
    for before, slot in zip([None, *slots], slots, strict=False):
        assert slot.first == (1 if before is None else before.last + 1)
        steps = {step for fault in slot.faults for step in fault.steps}
        assert all(max(slot.first, WARMUP + 1) <= step < slot.last for step in steps)
        if slot.cell.due is not None:
            assert {(step - 1) % TINY.layers for step in steps} == {slot.cell.due}
        assert slot.restored_after in {None, *steps}
        assert not {step - 1 for step in steps} & faulty - steps, "the step before is another cell's fault"
        faulty |= steps
    assert sum(len(slot.faults) for slot in slots) == len(planned(slots))


def test_cells_are_chosen_by_pattern_and_a_quick_run_has_some_of_every_row():
    patterns = ("*", "hang", "numerical-sdc/fsdp2", "hang*/*/*-0", CELLS[7].identity)
    assert [len(chosen(CELLS, ROWS, each)) for each in patterns] == [len(CELLS), 120, 60, 5, 1]
    quick = sampled(CELLS, 0, PAPER.sample)
    assert {cell.row for cell in quick} == {row.key for row in ROWS}
    assert len(quick) < 30
    assert quick == sampled(CELLS, 0, PAPER.sample) != sampled(CELLS, 1, PAPER.sample)


def test_four_ranks_on_cuda_are_enough_and_faults_move_to_the_rank_that_is_as_far_along():
    assert fitted(CELLS, Hardware()) == (CELLS, [])
    cells = on_cuda()
    assert {cell.place.ranks for cell in cells} == {1, 4}
    assert Counter(each.row for each in cells) == Counter(each.row for each in CELLS) + Counter(
        {"device-hang": 8}
    )
    (slow,) = [cell for cell in cells if cell.identity.startswith("compute-straggler/ddp/")]
    assert [truth.ranks for truth in slow.truths] == [(2,)]  # 9 of 16
    kinds = {cell.row: type(fault.effect) for cell in cells for fault in cell.faults}
    assert kinds["compute-straggler"] is DeviceSpin
    assert kinds["communication-straggler"] is Sleep
    for cell in cells:  # where two peers cannot settle it, less is to be named
        is_group = any(truth.scope is Scope.PEER_GROUP for truth in cell.truths)
        assert bool(cell.coarser) == (is_group or cell.row == "communication-straggler"), cell.identity


def test_what_needs_more_ranks_is_skipped_with_the_reason():
    cells, skipped = fitted(CELLS, Hardware(max_ranks=3))
    assert len(cells) + len(skipped) == len(CELLS)
    assert {cell.layout for cell in cells} == {"ddp", "fsdp2", "ddp-4", "fsdp2-4", "alone"}
    assert all("more than 3 ranks" in each.reason for each in skipped)


def test_ranks_are_started_again_while_the_device_is_busy_and_not_for_another_reason():
    busy = "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ..."
    failures = [{1: busy}, {0: "fine", 2: "... Error 807: MPS server is not ready to accept new clients"}]

    def start() -> str:
        if failures:
            raise RankError(failures.pop(0), 4)
        return "started"

    assert retried(start, pause_seconds=0.0) == "started"
    failures[:] = [{0: 'File "x.py", line 807, in f\nValueError: no such layer'}, {}]
    with pytest.raises(RankError, match="no such layer"):
        retried(start, pause_seconds=0.0)
    assert len(failures) == 1, "another failure is not tried again"
    failures[:] = [{0: busy}] * 5
    with pytest.raises(RankError, match="busy"):
        retried(start, tries=3, pause_seconds=0.0)
    assert len(failures) == 2


# Grades


@pytest.mark.parametrize(
    ("truths", "given", "flaw", "reason"),
    [
        ([], {}, None, ""),
        ([TRUTH], {"incidents": [incident()]}, None, ""),
        ([SLOW, TRUTH], {"incidents": [incident(), incident(STRAGGLER, (3,), surface="time/m")]}, None, ""),
        ([TRUTH], {}, Flaw.MISSED, "sdc of rank 9"),
        ([TRUTH], {"incidents": [incident(STRAGGLER)]}, Flaw.WRONG_NAME, "wrong manifestation"),
        ([TRUTH], {"incidents": [incident(ranks=(8, 9))]}, Flaw.WRONG_NAME, "wrong ranks"),
        ([TRUTH], {"incidents": [incident(scope=Scope.MACHINE)]}, Flaw.WRONG_NAME, "wrong scope"),
        ([TRUTH], {"incidents": [incident(surface="x/output")]}, Flaw.WRONG_NAME, "wrong surface"),
        ([TRUTH, SLOW], {"incidents": [incident()]}, Flaw.WRONG_NAME, "straggler of rank 3"),
        ([TRUTH], {"incidents": [incident()] * 2}, Flaw.FALSE_ALARM, "also reported: sdc of rank 9"),
        ([], {"incidents": [incident()]}, Flaw.FALSE_ALARM, "reported: sdc of rank 9"),
        ([TRUTH], {"incidents": [incident()], "unfired": unfired(FAULT, [])}, Flaw.NOT_INJECTED, "rank 9"),
        ([], {"unfired": unfired(FAULT, [])}, Flaw.NOT_INJECTED, "rank 9"),
        ([TRUTH], {"incidents": [incident()], "failures": ["E: gone"]}, Flaw.BROKEN, "E: gone"),
    ],
)
def test_a_cell_passes_when_exactly_what_is_wrong_was_reported(
    truths: list[GroundTruth], given: dict, flaw: Flaw | None, reason: str
):
    found = grade(truths, **given)
    assert found.flaw is flaw
    assert reason in found.reason
    assert found.passed is (flaw is None)


def test_what_fired_is_compared_with_what_was_planned():
    assert unfired(FAULT, [(9, "blocks.1/output")]) == []
    assert len(unfired(FAULT, [(8, "blocks.1/output"), (9, "blocks.2/output")])) == 1


CORRUPTED = [RecoveryRankResult([], [], 3, 0, {1: "a", 2: f"b{rank}", 3: "spoilt"}) for rank in range(2)]
RESUMED = [
    RecoveryRankResult([], [], None, 2, {2: f"b{rank}", 3: "c", 4: "d", STEPS: "e"}) for rank in range(2)
]


@pytest.mark.parametrize(
    ("before", "after", "flaw"),
    [
        ({}, {}, None),
        ({"poisoned": 4}, {}, Flaw.NOT_RECOVERED),
        ({"poisoned": None}, {}, Flaw.NOT_RECOVERED),
        ({}, {"resumed": 3}, Flaw.NOT_RECOVERED),
        ({}, {"digests": {2: "b0", STEPS: "e"}}, Flaw.NOT_RECOVERED),
        ({}, {"digests": {2: "b1", 3: "c"}}, Flaw.NOT_RECOVERED),
    ],
)
def test_every_rank_must_go_on_from_the_step_before(before: dict, after: dict, flaw: Flaw | None):
    first = [CORRUPTED[0], replace(CORRUPTED[1], **before)]
    second = [RESUMED[0], replace(RESUMED[1], **after)]
    assert recovered(3, first, second).flaw is flaw


@pytest.mark.parametrize(
    ("cycles", "step", "layer", "flaw"),
    [
        ([1, 1, 1], 4, "layer.0.mixture.experts x512", None),
        ([1, 1, 1], 5, "layer.0.mixture.experts x512", Flaw.WRONG_NAME),
        ([1, 1, 1], 4, "layer.0.mixture.experts x128", Flaw.WRONG_NAME),
        ([1, 1, 1], 4, "layer.1.mixture.experts x512", Flaw.WRONG_NAME),
        ([1, 1, 0], 4, "layer.0.mixture.experts x512", Flaw.BROKEN),
        ([1, 1, 2], 4, "layer.0.mixture.experts x512", Flaw.BROKEN),
        ([3, 3, 3], None, "", None),
        ([3, 3, 1], None, "", Flaw.BROKEN),
    ],
)
def test_a_wrong_expert_must_be_found_when_its_shape_is_due(
    cycles: list[int], step: int | None, layer: str, flaw: Flaw | None
):
    faults = FaultPlan().flip_bit(rank=15, at="layer.0/w", step=4, bit=3) if step else FaultPlan()
    seen = [MoeRankResult([], [], each, 0) for each in cycles]
    found = [incident(ranks=(15,), step=step, layer=layer)] if step else []
    assert in_its_turn(Cell("r", "n", "ep4", faults=faults), seen, found, Turns((128, 512), 2)).flaw is flaw


# Results


def result(cell: Cell, flaw: Flaw | None = None, seconds: float | None = 1.0) -> Result:
    found = (Found("sdc", "rank", (9,), "head/output", 2, "Rank 9 <differs>."),)
    given = Grade(flaw, "" if flaw is None else "wrong ranks: <rank 9>")
    return Result(cell.identity, cell.row, not cell.truths, given, seconds, 2.0, found)


def test_wilsons_interval_and_percentiles_by_nearest_rank():
    expected = {(344, 344): [0.989, 1.0], (5, 10): [0.2366, 0.7634], (0, 10): [0.0, 0.2775], (0, 0): [0, 1]}
    for counts, bounds in expected.items():
        assert [round(each, 4) for each in interval(*counts)] == bounds
    values = [float(number) for number in range(1, 21)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile([], 0.5)) == (10.0, 19.0, None)


def test_results_are_written_one_by_one_and_a_truncated_line_is_run_again(tmp_path: Path):
    store = Store(tmp_path, "paper", 0)
    first, second = result(CELLS[0]), result(CELLS[1], Flaw.WRONG_NAME, None)
    for each in (first, second, replace(second, grade=Grade())):
        store.add(each)
    with store.path.open("a") as file:
        file.write(json.dumps(result(CELLS[2]).to_json())[:50])
    again = Store(tmp_path, "paper", 0)
    assert again.results == {first.cell: first, second.cell: replace(second, grade=Grade())}
    again.add(result(CELLS[2]))
    assert len(Store(tmp_path, "paper", 0).results) == 3


def test_another_campaigns_folder_is_refused(tmp_path: Path):
    Store(tmp_path, "paper", 0, CUDA)
    Store(tmp_path, "paper", 0, replace(CUDA, max_ranks=8))
    for other in (("paper", 1, CUDA), ("ablation", 0, CUDA), ("paper", 0, replace(CUDA, backend="gloo"))):
        with pytest.raises(ValueError, match="belongs to another campaign"):
            Store(tmp_path, *other)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"loss": 1.5}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl:2"):
        Store(tmp_path, "paper", 0, CUDA)


def test_the_table_counts_what_passed_and_what_was_missed():
    cells = [cell for cell in CELLS if cell.row == "numerical-sdc"][:10]
    flaws = [None, Flaw.MISSED, Flaw.WRONG_NAME, Flaw.FALSE_ALARM, Flaw.NOT_INJECTED, *[None] * 5]
    results = {cell.identity: result(cell, flaw) for cell, flaw in zip(cells, flaws, strict=True)}
    (row,) = summarized(ROWS, cells, results)
    assert (row["run"], row["passed"]) == (10, 6)
    assert (row["missed"], row["wrong_names"], row["false_alarms"]) == (1, 1, 1)
    report = as_report("paper", 0, [row], [*results.values()])
    assert (report["passed"], report["complete"], len(report["failed"])) == (False, True, 4)
    html = page(report)
    assert "6/10" in screen_of([row], results.values(), "folder")
    assert "&lt;rank 9&gt;" in html
    assert "<rank 9>" not in html
    assert "://" not in html, "it needs nothing from elsewhere"
