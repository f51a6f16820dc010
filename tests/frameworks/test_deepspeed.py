"""DeepSpeed as it is shipped, on Gloo ranks: what is checked, what training keeps, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.deepspeed_jobs import (
    Plan,
    answering,
    attach_to_another_version,
    train_deterministically,
)
from tests.support.deepspeed_layouts import EXPERTS, HEALTHY, LLAMA, MORE, SOME_SMALL, each_of, scaled
from tests.support.hangs import QUICK
from tests.support.ranks import LiveRanks
from tests.support.scripts import EXAMPLES, losses_in, torchrun

__all__ = ["answering"]

slow = pytest.mark.slow


@pytest.mark.slow_cases("autotp zero-1 bf16", "experts zero-2 bf16", "zero-2 bf16", "zero-3 bf16")
@pytest.mark.parametrize("plan", each_of(HEALTHY) + each_of(MORE, slow))
def test_training_is_bitwise_the_same_and_everything_is_checked(four: LiveRanks, plan: Plan, tmp_path: Path):
    alone = four.ask(plan, 400)
    checked = four.ask(replace(plan, run_dir=tmp_path), 400)
    for rank, (plain, seen) in enumerate(zip(alone, checked, strict=True)):
        assert seen.bits == plain.bits
        assert len(seen.bits) == 6
        assert seen.places == seen.groups
        assert (seen.failures, seen.named) == ([], [])
        assert {name: why for name, why in seen.unchecked.items() if "did not step" not in str(why)} == {}
        assert not seen.unchecked or "fp16" in plan.settings
        parts = parts_of(plan, rank)
        assert {f"{part}/{what}" for part in parts for what in ("output", "parameters")} <= seen.agreed
        assert {f"{parts[1]}/grad_input", "optimizer/param", "optimizer/reproduced"} <= seen.agreed
        assert state_of(plan) <= seen.agreed
        # A step is what ends an accumulation, and nothing else.
        assert (seen.status["step"], seen.status["replay"]["checks"]) == (6, 6)


def parts_of(plan: Plan, rank: int) -> tuple[str, ...]:
    """What is replayed on a rank."""
    stages = (("0", "1", "2"), ("3", "4", "5"))
    return {
        "pipeline": stages[rank // 2],
        "mixture": ("tokens", "stack.0.up", *EXPERTS, "head"),
        "tensor": LLAMA,
    }.get(plan.kind, ("tokens", "stack.0", "stack.1", "head"))


def state_of(plan: Plan) -> set[str]:
    """What has copies is compared; what has one owner must not change by itself."""
    kept = {0: {"state/parameters", "state/optimizer"}, 3: {"state/owned"}}
    return kept.get(plan.stage, {"state/parameters", "state/owned"})


def test_a_skipped_update_ends_a_step_and_is_no_update(four: LiveRanks, tmp_path: Path):
    for seen in four.ask(replace(scaled(2, 20), run_dir=tmp_path), 120):
        scales = [2.0**20, *seen.scales.values()]
        skipped = {step for step in range(1, 7) if scales[step] < scales[step - 1]}
        assert skipped
        assert {each.step for each in seen.records if each.surface == "optimizer/update"} == {
            *range(1, 7)
        } - skipped
        assert (seen.status["step"], seen.status["replay"]["checks"]) == (6, 6)


@pytest.mark.long
def test_uneven_routing_is_no_incident(four: LiveRanks, tmp_path: Path):
    plan = Plan(2, "uneven", bf16=True, observer=QUICK, run_dir=tmp_path)
    for seen in four.ask(plan, 200):
        assert max(seen.routed) > sum(seen.routed) / 2
        assert (seen.failures, seen.named, seen.unchecked) == ([], [], {})
        assert {f"{expert}/output" for expert in EXPERTS} <= seen.agreed


ELSEWHERE = {"AutoEP": (Plan(0, "autoep"), "AutoEP")}


@slow
@pytest.mark.parametrize(("plan", "what"), each_of(ELSEWHERE))
def test_layers_that_cannot_be_called_again_leave_the_rest_checked_and_certified(
    four: LiveRanks, plan: Plan, what: str, tmp_path: Path
):
    plan = replace(plan, steps=3)
    alone, attached = four.ask(plan, 120), four.ask(replace(plan, run_dir=tmp_path), 120)
    for plain, found in zip(alone, attached, strict=True):
        assert found.bits == plain.bits
        assert (found.failures, found.named) == ([], [])
        said = f"DeepSpeed's {what} cannot be called again as in training"
        assert said in found.status["replay"]["covered"]["sentence"]
        assert {"state/parameters", "state/owned"} <= found.agreed
        assert found.status["replay"]["certified"] == 3


@pytest.mark.long
def test_what_zero_3_adds_to_make_partitions_equal_is_not_looked_at_for_nan(tmp_path: Path):
    """Three ranks divide no parameter, and DeepSpeed does not initialize what it adds to the last parts."""
    plan = Plan(3, zero=SOME_SMALL, bf16=True, run_dir=tmp_path)
    with LiveRanks(answering, 3) as three:
        for seen in three.ask(partial(train_deterministically, plan=plan), 120):
            assert (seen.failures, seen.named) == ([], [])
            assert seen.status["replay"]["certified"] == 6


def test_a_newer_series_of_deepspeed_is_replayed_and_rank_0_warns(four: LiveRanks, tmp_path: Path):
    seen = four.ask(partial(attach_to_another_version, run_dir=tmp_path), 60)
    assert seen[0].endswith(
        "deepspeed 0.20.0 is newer than 0.19.8, the newest release that torchscout was tried with; "
        "what torchscout uses of it is still there"
    )
    assert seen[1:] == [""] * 3


def test_a_newer_deepspeed_that_lacks_something_is_refused_with_its_name(four: LiveRanks, tmp_path: Path):
    seen = four.ask(partial(attach_to_another_version, run_dir=tmp_path, removed="autotp_size"), 60)
    refused = (
        "deepspeed 0.20.0 has no deepspeed.DeepSpeedEngine.autotp_size; 0.19.8 is the newest release that "
        "torchscout was tried with. Install that release, or set TORCHSCOUT=off to train without torchscout."
    )
    assert set(seen) == {refused}


@slow
def test_the_example_trains_and_goes_on_from_its_checkpoint(tmp_path: Path):
    script = EXAMPLES / "frameworks" / "deepspeed_zero.py"
    assert script.read_text().count("\n") < 60
    losses: dict[int, float] = {}
    for first, last in ((1, 10), (11, 15)):
        seen = losses_in(torchrun(3, [script, "--steps", last], tmp_path, DS_ACCELERATOR="cpu"))
        assert [*seen] == [*range(first, last + 1)]
        losses |= seen
    assert losses[15] < losses[1]
    assert not [*tmp_path.glob("scout-run-*/incidents.jsonl")]
