"""Faults in DeepSpeed's jobs on Gloo ranks: who is wrong, slow, late, or does something else is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.deepspeed_jobs import Plan, answering
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
from tests.support.hangs import QUICK, incidents, wait_for_incident
from tests.support.ranks import LiveRanks
from torchscout.campaign.cells.observed import released
from torchscout.config import ReplayConfig
from torchscout.faults.plan import FaultPlan

__all__ = ["answering"]

slow = pytest.mark.slow


STAGE = "3.up"
"""Of the second stage: ranks 2 and 3."""
SPOILED = {
    "zero-2, a weight": (Plan(2, faults=weight("stack.0.up", 2)), (2,), "stack.0.up/weight"),
    "zero-2, a layer": (Plan(2, faults=miscalculated("stack.1/output", 2)), (2,), "stack.1/output"),
    "zero-3, a layer": (Plan(3, faults=miscalculated("stack.1/output", 1)), (1,), "stack.1/output"),
    "pipeline": (Plan(1, "pipeline", faults=weight(STAGE, 3)), (2, 3), f"{STAGE}/weight"),
    "experts": (Plan(2, "mixture", faults=weight(f"{EXPERTS[1]}.0", 3)), (1, 3), f"{EXPERTS[1]}.0/weight"),
    "autotp": (
        Plan(1, "tensor", faults=weight("model.layers.0.mlp.down_proj", 2)),
        (0, 2),
        "model.layers.0.mlp.down_proj/weight",
    ),
}
MORE_SPOILED = {
    "zero-3, offloaded, a layer": (
        offloaded(3, faults=miscalculated("stack.1/output", 1)),
        (1,),
        "stack.1/output",
    ),
    "zero-0, a weight": (Plan(0, faults=weight("stack.0.up", 3)), (3,), "stack.0.up/weight"),
    "zero-0, a gradient": (
        Plan(0, faults=miscalculated("stack.1/grad_input", 0)),
        (0,),
        "stack.1/grad_input",
    ),
    "zero-1, a weight": (Plan(1, faults=weight("stack.1.down", 1)), (1,), "stack.1.down/weight"),
    "zero-2, a gradient": (
        Plan(2, faults=miscalculated("stack.1/grad_input", 2)),
        (2,),
        "stack.1/grad_input",
    ),
    "experts without zero": (
        Plan(0, "mixture", faults=weight(f"{EXPERTS[2]}.0", 0)),
        (0, 2),
        f"{EXPERTS[2]}.0/weight",
    ),
    "a dense part next to experts": (
        Plan(2, "mixture", faults=weight("stack.0.up", 1)),
        (1,),
        "stack.0.up/weight",
    ),
    "ulysses": (Plan(1, "ulysses", faults=weight("stack.0.qkv", 3)), (1, 3), "stack.0.qkv/weight"),
    "ulysses zero-3": (
        Plan(3, "ulysses", zero=SOME_SMALL, faults=miscalculated("stack.1/output", 1)),
        (1, 3),
        "stack.1/output",
    ),
    "zero-3 hpZ, a layer": (
        Plan(3, zero=WITHIN_PAIRS, faults=miscalculated("stack.1/output", 3)),
        (3,),
        "stack.1/output",
    ),
    "autotp zero-3": (
        Plan(3, "tensor", zero=SOME_SMALL, faults=miscalculated("model.layers.1/output", 2)),
        (0, 2),
        "model.layers.1/output",
    ),
}


@pytest.mark.slow_cases("experts", "zero-2, a layer", "zero-2, a weight", "zero-3, a layer")
@pytest.mark.parametrize(("plan", "ranks", "surface"), each_of(SPOILED) + each_of(MORE_SPOILED, slow))
def test_a_wrong_number_names_those_who_have_it(
    four: LiveRanks, plan: Plan, ranks: tuple[int, ...], surface: str, tmp_path: Path
):
    results = four.ask(replace(plan, steps=2, run_dir=tmp_path), 120)
    assert sum(each.fired for each in results) > 0
    (incident,) = results[0].incidents
    scope = "rank" if len(ranks) == 1 else "peer_group"
    assert results[0].named == [("sdc", scope, ranks, 2)], incident.sentence
    assert surface in {each.surface for each in incident.records}


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=slow)])
@pytest.mark.parametrize("what", ["at_rest", "miscalculating"])
def test_owned_state_is_watched_and_its_updates_are_recomputed(
    four: LiveRanks, what: str, stage: int, tmp_path: Path
):
    # Whoever owns a replayed update is the source of its round, and that is rank 2 in the third step.
    plan = replace(Plan(stage, bf16=True, steps=4, run_dir=tmp_path), **{what: 2})
    found = four.ask(plan, 120)
    assert found[0].named == [("sdc", "rank", (2,), 3)], found[0].incidents
    surface = {"at_rest": "state/owned", "miscalculating": "optimizer/update"}[what]
    assert found[0].incidents[0].records[0].surface == surface


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=slow)])
def test_owned_state_is_watched_while_an_update_is_skipped(four: LiveRanks, stage: int, tmp_path: Path):
    plan = replace(scaled(stage, 19), steps=6, at_rest=2, decays=4, run_dir=tmp_path)
    found = four.ask(plan, 120)
    scales = found[0].scales
    assert scales[4] < scales[3], "the fourth update is to be skipped"
    assert found[0].named == [("sdc", "rank", (2,), 4)], found[0].incidents
    assert found[0].status["replay"]["certified"] < 4


COPIES = {
    "zero-1 bf16": Plan(1, bf16=True),
    "zero-3 bf16": Plan(3, bf16=True, zero=SOME_SMALL),
}
MORE_COPIES = {
    "zero-0 bf16": Plan(0, bf16=True),
    "zero-2 bf16, offloaded": offloaded(2, bf16=True),
    "zero-1 bf16 optimizer": Plan(1, bf16=True, settings=FP32_SUMS),
    "zero-2": Plan(2),
    "zero-3, all gathered": Plan(3),
}


@pytest.mark.slow_cases("zero-3 bf16")
@pytest.mark.parametrize("plan", each_of(COPIES) + each_of(MORE_COPIES, slow))
def test_a_bit_that_the_next_update_overwrites_names_its_rank(four: LiveRanks, plan: Plan, tmp_path: Path):
    found = four.ask(replace(plan, steps=4, overwritten=2, run_dir=tmp_path), 120)
    assert found[0].named == [("sdc", "rank", (2,), 3)], found[0].incidents
    assert found[0].incidents[0].records[0].surface == "state/owned"
    assert all((each.status["replay"]["certified"] or 0) < 3 for each in found)


@pytest.mark.slow_cases("zero-3 bf16")
@pytest.mark.parametrize("plan", each_of(COPIES) + each_of(MORE_COPIES, slow))
def test_unchanged_working_copies_are_certified(four: LiveRanks, plan: Plan, tmp_path: Path):
    for each in four.ask(replace(plan, steps=4, replay=ReplayConfig(interval=2), run_dir=tmp_path), 120):
        assert (each.failures, each.named) == ([], [])
        replay = each.status["replay"]
        assert (replay["certified"], replay["watched"]) == (4, 1.0)
        assert replay["covered"]["missing"] == {}


@slow
def test_parameters_that_hpz_writes_in_the_forward_pass_are_named_as_not_covered(
    four: LiveRanks, tmp_path: Path
):
    plan = Plan(3, zero=WITHIN_PAIRS, steps=4, replay=ReplayConfig(interval=2), run_dir=tmp_path)
    for each in four.ask(plan, 120):
        assert (each.failures, each.named, each.status["replay"]["certified"]) == ([], [], 4)
        (names,) = each.status["replay"]["covered"]["missing"].values()
        assert "stack.0.up/weight.secondary" in names


def slow_layers(places: tuple[str, ...], rank: int) -> FaultPlan:
    faults = FaultPlan()
    for place in places:
        faults = faults.delay(rank=rank, at=f"{place}/forward", step=range(3, 9), seconds=0.25, calls=None)
    return faults


BOTH = slow_layers(("stack.0", "stack.1"), 1)
SLOW = {"zero-2": (Plan(2, faults=BOTH), (1,))}
MORE_SLOW = {
    "zero-0": (Plan(0, faults=BOTH), (1,)),
    "zero-3, offloaded": (offloaded(3, faults=BOTH), (1,)),
    "zero-1": (Plan(1, bf16=True, faults=BOTH), (1,)),
    "zero-3": (Plan(3, zero=SOME_SMALL, faults=BOTH), (1,)),
    "pipeline": (Plan(1, "pipeline", faults=slow_layers(("1", "2"), 1)), (0, 1)),
    "a dense part next to experts": (
        Plan(2, "mixture", steps=8, faults=slow_layers(("stack.1.up", "stack.1.down"), 1)),
        (1,),
    ),
    "experts": (Plan(2, "mixture", faults=slow_layers(EXPERTS, 1)), (1, 3)),
    "experts without zero": (Plan(0, "mixture", faults=slow_layers(EXPERTS, 1)), (1, 3)),
    "ulysses": (Plan(1, "ulysses", faults=BOTH), (1, 3)),
    "autotp": (Plan(1, "tensor", faults=slow_layers(("model.layers.0", "model.layers.1"), 1)), (1, 3)),
}
"""Of two that do the same work, both: one of them is late, and nothing says which is as it should be."""


@pytest.mark.slow_cases("zero-2")
@pytest.mark.parametrize(("plan", "ranks"), each_of(SLOW) + each_of(MORE_SLOW, slow))
def test_a_slow_rank_is_named(four: LiveRanks, plan: Plan, ranks: tuple[int, ...], tmp_path: Path):
    found = four.ask(replace(plan, run_dir=tmp_path), 120)
    assert found[1].fired > 4
    scope = "rank" if len(ranks) == 1 else "peer_group"
    assert {each[:3] for one in found for each in one.named} == {("straggler", scope, ranks)}, found[
        0
    ].incidents


EXCHANGE, SUM = "all_to_all@mesh_sequence_parallel", "all_reduce@mesh_tensor_parallel"
LATE = {"zero-2": (Plan(2), "stack.1")}
MORE_LATE = {
    "zero-0": (Plan(0), "stack.1"),
    "zero-2, offloaded": (offloaded(2), "stack.1"),
    "zero-1": (Plan(1, bf16=True), "stack.1"),
    "zero-3": (Plan(3, zero=SOME_SMALL), "stack.1"),
    "pipeline": (Plan(1, "pipeline"), "4"),
    "pipeline zero-0": (Plan(0, "pipeline"), "4"),
    "autotp": (Plan(1, "tensor"), "model.layers.1"),
    "autotp zero-0": (Plan(0, "tensor"), "model.layers.1"),
    "ulysses": (Plan(1, "ulysses"), "stack.1"),
    "experts": (Plan(2, "mixture"), "stack.1.up"),
}


@pytest.mark.long_cases("zero-2")
@pytest.mark.parametrize(("plan", "layer"), each_of(LATE) + each_of(MORE_LATE, slow))
def test_a_late_rank_is_named(four: LiveRanks, plan: Plan, layer: str, tmp_path: Path):
    stalled = FaultPlan().stall(rank=2, at=f"{layer}/forward", step=4, seconds=60.0)
    faults = released(stalled, tmp_path / "incidents.jsonl")  # it ends when the hang is reported
    observer = replace(QUICK, silence_multiple=1.0)  # on a busy machine the first step takes seconds
    found = four.ask(replace(plan, replay=None, observer=observer, faults=faults, run_dir=tmp_path), 120)
    assert [each.fired for each in found] == [0, 0, 1, 0]
    assert [each[:3] for each in found[0].named] == [("hang", "rank", (2,))], found[0].incidents


WHOLE_SEQUENCE = {"sequence_parallel_size": 4}
WHOLE_LAYERS = {"tensor_parallel": {"autotp_size": 4}}
"""All four ranks are in the group, which is the default one: PyTorch makes no other for an axis over all."""
OTHERS = {
    "zero-0": (Plan(0), "all_reduce@undefined", "dtype", (1,)),
    "zero-1": (Plan(1), "all_reduce@undefined", "shape", (1,)),
    "zero-1, gathering": (Plan(1), "all_gather@undefined", "dtype", (1,)),
    "zero-2": (Plan(2, bf16=True), "all_reduce@undefined", "dtype", (1,)),
    "zero-3": (Plan(3, zero=SOME_SMALL), "reduce_scatter@default_pg", "dtype", (1,)),
    "zero-3, gathering": (Plan(3, bf16=True, zero=SOME_SMALL), "all_gather@default_pg", "shape", (1,)),
    "zero-3 hpZ": (Plan(3, zero=WITHIN_PAIRS), "all_gather@undefined", "operation", (0, 1)),
    "pipeline, a transfer": (Plan(1, "pipeline"), "send@default_pg", "shape", (1, 3)),
    "experts zero-0": (Plan(0, "one_each"), "all_to_all@undefined", "dtype", (1,)),
    "experts zero-2": (Plan(2, "mixture", bf16=True), "all_to_all@undefined", "operation", (0, 1)),
    "ulysses zero-1": (Plan(1, "ulysses", settings=WHOLE_SEQUENCE), "all_to_all@default_pg", "dtype", (1,)),
    "ulysses zero-3": (Plan(3, "ulysses", zero=SOME_SMALL), EXCHANGE, "operation", (0, 1)),
    "autotp zero-0": (Plan(0, "tensor", settings=WHOLE_LAYERS), "all_reduce@default_pg", "shape", (1,)),
    "autotp zero-1": (Plan(1, "tensor", settings=WHOLE_LAYERS), "all_reduce@default_pg", "dtype", (1,)),
    "autotp zero-2": (Plan(2, "tensor"), SUM, "operation", (0, 1)),
    "autotp zero-3": (Plan(3, "tensor", zero=SOME_SMALL), SUM, "operation", (0, 1)),
}
"""Of a group of three or more the rank is named, of two both."""


@slow
@pytest.mark.parametrize(("plan", "at", "what", "ranks"), each_of(OTHERS))
def test_a_rank_with_another_collective_is_named(
    plan: Plan, at: str, what: str, ranks: tuple[int, ...], tmp_path: Path
):
    does_something_else(plan, at, what, 4, tmp_path)
    scope = "rank" if len(ranks) == 1 else "process_group"
    found = incidents(tmp_path)
    assert {(each.scope.value, each.ranks) for each in found} == {(scope, ranks)}, found
    # That the two of a pair wait for each other would be another finding.
    assert all(each.records[0].surface.startswith("fingerprint/") for each in found), found


STAGES = {
    "pipeline zero-0": (Plan(0, "pipeline"), "all_reduce@undefined", "dtype"),
    "pipeline zero-1": (Plan(1, "pipeline"), "all_gather@undefined", "shape"),
}


@slow
@pytest.mark.parametrize(("plan", "at", "what"), each_of(STAGES))
def test_one_of_three_with_the_same_stage_and_another_collective_is_named(
    plan: Plan, at: str, what: str, tmp_path: Path
):
    does_something_else(plan, at, what, 6, tmp_path)
    (incident,) = incidents(tmp_path)
    assert (incident.scope.value, incident.ranks) == ("rank", (1,)), incident.sentence
    assert incident.sentence.count("where other members issued") == 1
    assert "more" not in incident.sentence, incident.sentence


def does_something_else(plan: Plan, at: str, what: str, size: int, tmp_path: Path) -> None:
    """Rank 1 does. Gloo may abort a process over it, or never return: nobody is asked for an answer."""
    faults = FaultPlan().change_collective(rank=1, at=at, axis="replica", step=4, what=what)
    fired = tmp_path / "fired"
    lasting = replace(QUICK, grace_seconds=30.0)  # the hub's own rank may be the one that is aborted
    plan = replace(plan, replay=None, observer=lasting, faults=faults, log=fired, run_dir=tmp_path)
    with LiveRanks(answering, size) as ranks:
        ranks.send(plan)
        wait_for_incident(tmp_path, 60)
        ranks.have_answered(2.0)  # what else there is to be found
    assert fired.read_text().count("\n") == 1
