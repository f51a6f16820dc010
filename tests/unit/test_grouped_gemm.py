"""The grouped GEMM computes what torch does, counts what it did, and can be perturbed in one place.

Triton decides at import whether its interpreter runs the kernel, so this file runs itself once in a process
of its own, on host memory with tiny tiles, and the tests read what that process printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
TILE = (16, 16, 16, 2)
"""Rows, columns, step, row tiles in a group."""

CASES: dict[str, tuple[int, int, tuple[int, ...], int]] = {
    "nothing": (16, 16, (0,), 2),
    "one tile": (16, 16, (16,), 2),
    "half a tile": (16, 16, (8,), 1),
    "less than half a tile": (16, 16, (7,), 1),
    "tails everywhere": (40, 24, (0, 7, 32, 0, 21), 3),
    "odd features": (33, 50, (5, 40), 4),
    "one feature": (1, 1, (3, 0), 2),
    "more programs than tiles": (24, 20, (12, 8, 24), 20),
    "many rows of tiles": (16, 32, (90,), 4),
}
"""Hidden, intermediate, rows of each expert, programs."""
PERTURBED = (18, 20, (0, 7, 18), 2)


def run_cases() -> dict[str, Any]:
    from torchscout.campaign.cells.moe import speed_up_interpreter

    speed_up_interpreter()
    return {
        "cases": {name: run_case(*case) for name, case in CASES.items()},
        "regimes": run_regimes(),
        "perturbed": run_perturbed(*PERTURBED),
        "training": run_training(),
        "faulty": run_faulty(),
    }


def run_case(hidden: int, intermediate: int, rows: tuple[int, ...], programs: int) -> dict[str, Any]:
    import torch

    from tests.support.grouped_gemm_oracle import reference, worst_error
    from torchscout.experts.kernel.grouped_gemm import GroupedGemm, Tiling
    from torchscout.experts.kernel.profiler import KernelProfiler
    from torchscout.experts.kernel.work_items import Pass

    tiling = Tiling(*TILE)
    torch.manual_seed(0)
    x, gradient = torch.randn(sum(rows), hidden), torch.randn(sum(rows), intermediate)
    weights = torch.randn(len(rows), hidden, intermediate)
    x, gradient, weights = x.bfloat16(), gradient.bfloat16(), weights.bfloat16()
    gemm, placed = (
        GroupedGemm(hidden, intermediate, programs=programs, tiling=tiling),
        torch.tensor(rows).int(),
    )
    results = {
        "forward": gemm.forward(x, weights, placed),
        "input_gradient": gemm.input_gradient(gradient, weights, placed),
        "weight_gradient": gemm.weight_gradient(x, gradient, placed),
    }
    expected = reference(x, weights, gradient, rows)
    counted = torch.full_like(results["forward"], 7)
    counters = torch.zeros(16, dtype=torch.int32)
    gemm.launch(Pass.FORWARD, (x, weights, counted), placed, counters=counters)
    profiler = KernelProfiler(hidden, intermediate, len(rows), device="cpu", programs=programs, tiling=tiling)
    first, again = profiler.profile(rows), profiler.profile(rows)
    return {
        "errors": {which: worst_error(result, expected[which]) for which, result in results.items()},
        "counts": dict(first.path_counts),
        "stable": first == again,
        "counting changes nothing": torch.equal(counted, results["forward"]),
    }


def run_regimes() -> dict[str, list[str]]:
    """Fingerprints of 1, 3 and 4 tiles of rows on 3 programs."""
    from torchscout.experts.kernel.grouped_gemm import Tiling
    from torchscout.experts.kernel.profiler import KernelProfiler

    def seen(regime: Any) -> list[str]:
        profiler = KernelProfiler(16, 16, device="cpu", regime=regime, programs=3, tiling=Tiling(*TILE))
        return [profiler.profile((16 * tiles,)).fingerprint for tiles in (1, 3, 4)]

    return {regime: seen(regime) for regime in ("pressure", "waves")}


def run_perturbed(hidden: int, intermediate: int, rows: tuple[int, ...], programs: int) -> dict[str, Any]:
    import torch

    from torchscout.experts.kernel.grouped_gemm import FAULT_WORDS, Perturbation, Projection, Tiling
    from torchscout.experts.kernel.perturbation import _all_faults, qualify
    from torchscout.experts.kernel.work_items import Pass, WorkItem

    projection = Projection(
        hidden, intermediate, len(rows), device="cpu", programs=programs, tiling=Tiling(*TILE)
    )
    placed = projection.place(rows)

    def perturb(which: Pass, fault: Perturbation) -> tuple[list[int], torch.Tensor]:
        words = torch.tensor([*fault, *[0] * (FAULT_WORDS - 2)], dtype=torch.int32)
        projection.execute(which, placed, fault=words)
        return words.tolist(), projection.result(which, rows).clone()

    places: dict[str, list[Any]] = {}
    for which in Pass:
        counters = torch.zeros(16, dtype=torch.int32)
        projection.execute(which, placed, counters=counters)
        clean = projection.result(which, rows).clone()
        quiet, same = perturb(which, Perturbation(-1))
        assert quiet[2:] == [0] * (FAULT_WORDS - 2)
        assert torch.equal(same, clean), "a kernel that could be perturbed computes something else"
        for fault in _all_faults(projection, rows, which, counters.tolist()):
            (_, _, fired, tile_role, step_role, *_), result = perturb(which, fault)
            where = (result != clean).nonzero().tolist()
            names = WorkItem(tile_role).word, WorkItem(step_role).word if step_role else None
            places.setdefault(which.word, []).append([*fault, fired, *names, where])
    beyond, _ = perturb(Pass.FORWARD, Perturbation(0, 99))
    found = qualify(projection, [rows[::-1]], most=4)
    return {"places": places, "beyond": beyond[2], "found": [found.injected, found.fired, found.changed]}


def run_training() -> dict[str, float]:
    """Errors of the gradients of two experts, one without rows, against torch in float32."""
    import torch
    from torch.nn import functional

    from tests.support.grouped_gemm_oracle import worst_error
    from torchscout.experts.kernel.expert_layer import Experts

    torch.manual_seed(0)
    experts = Experts(2, 24, 40, activation=functional.gelu)
    x = torch.randn(9, 24, requires_grad=True)
    wanted = torch.randn(9, 24)
    out = experts(x, torch.tensor([9, 0]))
    (out * wanted).sum().backward()
    leaves = [x, experts.up, experts.down]
    plain = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    expected = functional.gelu(plain[0] @ plain[1][0]) @ plain[2][0]
    (expected * wanted).sum().backward()
    errors = {"output": worst_error(out.detach(), expected.detach())}
    for name, leaf, other in zip(("x", "up", "down"), leaves, plain, strict=True):
        errors[name] = worst_error(leaf.grad, other.grad)
    return errors


def run_faulty() -> dict[str, Any]:
    """Experts on a kernel that falls ill between two calls: what differs then, and what it counted."""
    import torch

    from torchscout.experts.kernel.expert_layer import Experts
    from torchscout.experts.kernel.grouped_gemm import GroupedGemm, Tiling
    from torchscout.faults.effects import PerturbKernel
    from torchscout.faults.faulty_gemm import FaultyGemm, times_applied

    def on(kind: type[GroupedGemm]) -> Experts:
        torch.manual_seed(0)
        return Experts(2, 24, 40, gemm=lambda h, i, _: kind(h, i, programs=2, tiling=Tiling(*TILE)))

    x, rows = torch.randn(20, 24), torch.tensor([20, 0])
    well, faulty = on(GroupedGemm), on(FaultyGemm)
    same = torch.equal(well(x, rows), faulty(x, rows))
    before = times_applied()
    PerturbKernel(tile=1).happen()
    changed = (well(x, rows) != faulty(x, rows)).any(1).nonzero().flatten().tolist()
    return {"same": same, "before": before, "after": times_applied(), "changed": changed}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [sys.executable, __file__], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def tiling() -> SimpleNamespace:
    return SimpleNamespace(rows=TILE[0], columns=TILE[1], step=TILE[2])


@pytest.mark.parametrize("name", CASES)
def test_all_three_results_are_those_of_torch(interpreted, name):
    errors = interpreted["cases"][name]["errors"]
    assert max(errors.values()) < 2**-7, errors  # bfloat16 has 8 bits, which the interpreter cuts off


@pytest.mark.parametrize("name", CASES)
def test_every_path_is_counted_as_often_as_the_shape_calls_for_it(interpreted, name):
    from tests.support.grouped_gemm_oracle import counts_of

    hidden, intermediate, rows, programs = CASES[name]
    expected = counts_of(rows, hidden, intermediate, tiling(), programs)
    assert interpreted["cases"][name]["counts"] == expected


def test_the_cases_run_every_role_of_every_pass():
    from tests.support.grouped_gemm_oracle import PASSES, counts_of
    from torchscout.experts.kernel.work_items import WorkItem

    run = {
        path
        for hidden, inter, rows, programs in CASES.values()
        for path in counts_of(rows, hidden, inter, tiling(), programs)
    }
    assert run == {f"{which}/{role.word}" for which in PASSES for role in WorkItem}


def test_counting_changes_no_result_and_repeats_give_the_same_profile(interpreted):
    for name, case in interpreted["cases"].items():
        assert (case["counting changes nothing"], case["stable"]) == (True, True), name


def test_a_regime_is_whether_a_multiprocessor_idles_or_strictly_how_many_waves_there_are(interpreted):
    one, three, four = interpreted["regimes"]["pressure"]
    assert one != three
    assert three == four
    assert "forward kernel=interpreted 16x16x16 group=2 warps=8 stages=3 idle;" in one
    assert "forward kernel=interpreted 16x16x16 group=2 warps=8 stages=3 full;" in three
    one, three, four = interpreted["regimes"]["waves"]
    assert one == three != four
    assert "waves=2; input_gradient" in four


@pytest.mark.parametrize("which", ["forward", "input_gradient", "weight_gradient"])
def test_every_work_item_can_be_perturbed_alone(interpreted, which):
    """Each fault fires once and changes one element: the last of its tile, as the shape has it."""
    from tests.support.grouped_gemm_oracle import tiles_of

    hidden, intermediate, rows, _ = PERTURBED
    expected = []
    for tile in tiles_of(which, rows, hidden, intermediate, tiling()):
        above = sum(rows[: tile.expert])
        last = [tile.bottom, tile.right]
        place = [tile.expert, *last] if which == "weight_gradient" else [above + last[0], last[1]]
        steps = ["step_full"] * tile.steps + ["step_tail"] * tile.tail_steps
        expected += [(place, step, tile.role, role) for step, role in enumerate([None, *steps], start=-1)]
    faults = interpreted["perturbed"]["places"][which]
    assert all(fired == 1 and len(where) == 1 for _, _, fired, _, _, where in faults), faults
    found = [(where[0], step, tile_role, step_role) for _, step, _, tile_role, step_role, where in faults]
    assert sorted(found, key=str) == sorted(expected, key=str)
    at_tile: dict[int, set[str]] = {}
    for tile, *_, where in faults:
        at_tile.setdefault(tile, set()).add(str(where))
    assert all(len(places) == 1 for places in at_tile.values()), "steps of one tile show in different tiles"


def test_a_fault_in_a_missing_work_item_does_not_fire(interpreted):
    assert interpreted["perturbed"]["beyond"] == 0


def test_work_that_was_counted_and_not_perturbed_is_named():
    from torchscout.experts.kernel.perturbation import _unaccounted
    from torchscout.experts.kernel.work_items import Pass, WorkItem

    counted = [0] * len(WorkItem)
    counted[WorkItem.INTERIOR.value], counted[WorkItem.STEP_FULL.value], counted[WorkItem.EMPTY.value] = (
        1,
        2,
        1,
    )
    tile, first, second = [0, -1, 1, 0, 0], [0, 0, 1, 0, 7], [0, 1, 1, 0, 7]
    assert _unaccounted((16,), Pass.FORWARD, [tile, first, second], counted) == []
    (named,) = _unaccounted((16,), Pass.FORWARD, [tile, first], counted)
    assert "forward: step_full perturbed 1 times, counted 2 times" in named
    (named,) = _unaccounted((16,), Pass.WEIGHT_GRADIENT, [tile, first, second], counted)
    assert "empty perturbed 0 times, counted 1 times" in named


def test_a_sample_of_the_work_items_can_be_qualified(interpreted):
    injected, fired, changed = interpreted["perturbed"]["found"]
    assert injected == fired == changed
    assert 3 <= injected <= 12


def test_expert_layers_train_on_it(interpreted):
    errors = interpreted["training"]
    assert set(errors) == {"output", "x", "up", "down"}
    assert max(errors.values()) < 0.03, errors  # operands are rounded to bfloat16


def test_a_corrupted_kernel_computes_one_tile_wrong_and_reports_it(interpreted):
    """Of 20 rows the second tile that is taken is the last 4, in both projections."""
    faulty = interpreted["faulty"]
    assert (faulty["same"], faulty["before"], faulty["after"]) == (True, 0, 2)
    assert faulty["changed"] == [19]


def test_a_qualification_in_which_something_was_missed_does_not_pass():
    from torchscout.campaign.cells.kernel_process import grade_of
    from torchscout.campaign.grading import Flaw
    from torchscout.experts.kernel.grouped_gemm import Perturbation
    from torchscout.experts.kernel.perturbation import Injected, Qualification
    from torchscout.experts.kernel.work_items import Pass

    missed = Injected((16,), Pass.FORWARD, Perturbation(3, 1))
    assert grade_of(Qualification(9, 9, 9)).passed
    grades = [
        grade_of(Qualification(9, 8, 8, missed)),
        grade_of(Qualification(9, 9, 8, missed)),
        grade_of(Qualification(9, 9, 9, None, ["rows (16,): interior perturbed 0 times"])),
    ]
    assert [each.flaw for each in grades] == [Flaw.NOT_INJECTED, Flaw.MISSED, Flaw.BROKEN]
    assert grades[1].reason == "1 changed nothing: rows (16,), forward, tile 3, step 1"


def test_without_the_interpreter_a_cpu_tensor_is_refused():
    import torch

    from torchscout.experts.kernel.expert_layer import grouped_linear

    x, weights = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(1, 4, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="runs on CUDA, got a tensor on cpu"):
        grouped_linear(x, weights, [2])
    with pytest.raises(ValueError, match=r"bfloat16, got torch.float32"):
        grouped_linear(x.float(), weights, [2])
    with pytest.raises(ValueError, match=r"got \[2, 4\] and \[4, 4\]"):
        grouped_linear(x, weights[0], [2])


def test_without_triton_one_sentence_says_what_to_install(monkeypatch):
    import torch

    from torchscout.experts.kernel.expert_layer import grouped_linear

    monkeypatch.setitem(sys.modules, "triton", None)
    x, weights = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(1, 4, 4, dtype=torch.bfloat16)
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        grouped_linear(x, weights, [2])


if __name__ == "__main__":
    print(json.dumps(run_cases()))
