"""DeepSpeed's jobs on Gloo ranks that go on from checkpoints, after SIGKILL and after wrong numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.deepspeed_jobs import Plan, Result, answering, train
from tests.support.deepspeed_layouts import (
    EXPERTS,
    FP32_SUMS,
    SOME_SMALL,
    WITHIN_PAIRS,
    each_of,
    miscalculated,
    offloaded,
    scaled,
    weight,
)
from tests.support.ranks import LiveRanks, RankError, run_ranks
from torchscout.checkpoint.trust.selection import SweepResult
from torchscout.faults.plan import FaultPlan

__all__ = ["answering"]

slow = pytest.mark.slow
WRONG_STEP = 5
"""At whose end a number is wrong."""
KILLED = {"zero-3": Plan(3, bf16=True, zero=SOME_SMALL)}
MORE_KILLED = {
    "zero-0": Plan(0, bf16=True),
    "zero-2, offloaded": offloaded(2, bf16=True),
    "zero-3 bf16, offloaded": offloaded(3, bf16=True),
    "zero-0 fp16": scaled(0, 26),
    "zero-1": Plan(1),
    "zero-1 bf16 optimizer": Plan(1, bf16=True, settings=FP32_SUMS),
    "zero-2": Plan(2, bf16=True),
    "zero-2 fp16": scaled(2, 21),
    "zero-3 hpZ": Plan(3, bf16=True, zero=WITHIN_PAIRS),
    "zero-3 fp16": scaled(3, 21, zero=SOME_SMALL),
    "zero-3, born in shards": Plan(3, "born_sharded", bf16=True, zero=SOME_SMALL),
    "streams by name": Plan(1, "streams"),
    "pipeline zero-0": Plan(0, "pipeline"),
    "pipeline zero-1": Plan(1, "pipeline", bf16=True),
    "experts zero-0": Plan(0, "mixture"),
    "experts zero-1": Plan(1, "mixture"),
    "experts zero-2": Plan(2, "mixture", bf16=True),
    "ulysses zero-1": Plan(1, "ulysses", bf16=True),
    "ulysses zero-3": Plan(3, "ulysses", bf16=True),
    "autotp zero-0": Plan(0, "tensor"),
    "autotp zero-1": Plan(1, "tensor", bf16=True),
    "autotp zero-2": Plan(2, "tensor", bf16=True),
    "autotp zero-3": Plan(3, "tensor", bf16=True, zero=SOME_SMALL),
}


@pytest.mark.slow_cases("zero-3")
@pytest.mark.parametrize("plan", each_of(KILLED) + each_of(MORE_KILLED, slow))
def test_a_killed_job_goes_on_as_if_nothing_had_happened(four: LiveRanks, plan: Plan, tmp_path: Path):
    plan = replace(plan, steps=7)
    alone = four.ask(plan, 200)
    plan = replace(plan, directory=tmp_path / "checkpoints")
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, 4, replace(plan, killed=6, run_dir=tmp_path / "first"), timeout=200)
    again = four.ask(replace(plan, run_dir=tmp_path / "second"), 200)
    for whole, found in zip(alone, again, strict=True):
        goes_on(plan, whole, found)


def goes_on(plan: Plan, whole: Result, found: Result) -> None:
    # What is due after a step is captured when the next one begins, and a pipeline is killed before that.
    # A step that updates nothing certifies nothing.
    assert found.resumed is not None
    done = found.resumed.step
    assert done in ({4} if plan.kind == "pipeline" else {4, 5} if "fp16" in plan.settings else {5})
    assert (found.failures, found.named) == ([], [])
    if "fp16" in plan.settings:  # a scaler that begins anew would show
        assert whole.scales[done] != 2.0 ** plan.settings["fp16"]["initial_scale_power"]
    if plan.kind != "mixture":  # whose many parts have not all had their turn by then
        assert (found.resumed.swept, found.resumed.unswept) == (SweepResult.CLEAN, None)
    assert found.bits == {step: whole.bits[step] for step in range(done + 1, 8)}


DOWN, STAGE, EXPERT = "stack.1.down", "3.up", f"{EXPERTS[1]}.0"
SHARED = "model.layers.0.mlp.down_proj"
"""A layer whose parts are on several ranks."""
WRONG = {"zero-1": (Plan(1), weight(DOWN, 1, WRONG_STEP), (1,))}
MORE_WRONG = {
    "zero-0": (Plan(0), weight(DOWN, 1, WRONG_STEP), (1,)),
    "zero-2": (Plan(2, bf16=True), weight(DOWN, 2, WRONG_STEP), (2,)),
    "zero-3": (Plan(3, zero=SOME_SMALL), miscalculated("stack.0/output", 1, WRONG_STEP), (1,)),
    "zero-3 hpZ": (Plan(3, zero=WITHIN_PAIRS), miscalculated("stack.0/output", 3, WRONG_STEP), (3,)),
    "pipeline zero-0": (Plan(0, "pipeline"), weight(STAGE, 3, WRONG_STEP), (2, 3)),
    "pipeline zero-1": (Plan(1, "pipeline", bf16=True), weight(STAGE, 3, WRONG_STEP), (2, 3)),
    "experts zero-0": (Plan(0, "mixture"), weight(EXPERT, 3, WRONG_STEP), (1, 3)),
    "experts zero-2": (Plan(2, "mixture", bf16=True), weight(EXPERT, 3, WRONG_STEP), (1, 3)),
    "ulysses zero-1": (Plan(1, "ulysses"), weight("stack.0.qkv", 3, WRONG_STEP), (1, 3)),
    "ulysses zero-3": (
        Plan(3, "ulysses", zero=SOME_SMALL),
        miscalculated("stack.0/output", 1, WRONG_STEP),
        (1, 3),
    ),
    "autotp zero-0": (Plan(0, "tensor"), weight(SHARED, 2, WRONG_STEP), (0, 2)),
    "autotp zero-1": (Plan(1, "tensor", bf16=True), weight(SHARED, 2, WRONG_STEP), (0, 2)),
    "autotp zero-2": (Plan(2, "tensor"), weight(SHARED, 2, WRONG_STEP), (0, 2)),
    "autotp zero-3": (
        Plan(3, "tensor", zero=SOME_SMALL),
        miscalculated("model.layers.0/output", 1, WRONG_STEP),
        (1, 3),
    ),
}


@pytest.mark.long_cases("zero-1")
@pytest.mark.parametrize(("plan", "faults", "ranks"), each_of(WRONG) + each_of(MORE_WRONG, slow))
def test_state_after_a_wrong_number_is_not_certified(
    four: LiveRanks, plan: Plan, faults: FaultPlan, ranks: tuple[int, ...], tmp_path: Path
):
    plan = replace(plan, steps=7, directory=tmp_path / "checkpoints")
    scope = "rank" if len(ranks) == 1 else "peer_group"
    for found in four.ask(replace(plan, faults=faults, run_dir=tmp_path / "first"), 120):
        assert ("sdc", scope, ranks, WRONG_STEP) in found.named, found.incidents
        assert found.status["checkpoint"]["verified"] == 4
    goes_on_from(4, four, plan, tmp_path)


@slow
def test_state_after_a_spontaneous_change_of_a_shard_is_not_certified(four: LiveRanks, tmp_path: Path):
    # It may have changed before what follows the second step was captured, or after.
    plan = Plan(3, bf16=True, zero=SOME_SMALL, steps=7, directory=tmp_path / "checkpoints")
    for found in four.ask(replace(plan, at_rest=2, run_dir=tmp_path / "first"), 120):
        assert ("sdc", "rank", (2,), 3) in found.named, found.incidents
        assert found.status["checkpoint"]["verified"] == 1
    goes_on_from(1, four, plan, tmp_path)


def goes_on_from(done: int, four: LiveRanks, plan: Plan, folder: Path) -> None:
    alone = four.ask(replace(plan, directory=None), 120)
    for whole, found in zip(alone, four.ask(replace(plan, run_dir=folder / "second"), 120), strict=True):
        assert found.resumed is not None
        assert found.resumed.step == done
        assert found.bits == {step: whole.bits[step] for step in range(done + 1, 8)}
