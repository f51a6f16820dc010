"""The real Megatron-Core: wrong numbers, slow layers and links, late ranks, other collectives are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.hangs import FAULTY_STEP, QUICK, STALL, incidents, wait_for_incident
from tests.support.megatron_jobs import Trial, answering, train
from tests.support.megatron_layouts import (
    EXPERTS,
    FSDP,
    GATHERED,
    INSTANCES,
    LARGE,
    MIXED,
    NO_REPLAY,
    PIPELINE,
    REPLICAS,
    SHARDED,
    TENSOR,
    VIRTUAL,
    each_of,
)
from tests.support.ranks import LiveRanks, run_ranks
from torchscout.config import ReplayConfig
from torchscout.faults.plan import FaultPlan

ALL = None
REPLAYED = range(1, 200)


def output_of(layer: str, rank: int) -> FaultPlan:
    return FaultPlan().flip_bit(rank=rank, at=f"{layer}/output", step=2, bit=20, calls=REPLAYED)


def weight_of(layer: str, rank: int) -> FaultPlan:
    return FaultPlan().flip_bit(rank=rank, at=f"{layer}.linear_fc1/weight", step=2, bit=20)


EXPERT = "decoder.layers.0.mlp.experts.local_experts"
SPOILED = {
    "a layer": (replace(REPLICAS, faults=output_of("decoder.layers.1", 2)), (2,), "decoder.layers.1/output"),
    "a weight": (
        replace(REPLICAS, faults=weight_of("decoder.layers.0.mlp", 1)),
        (1,),
        "decoder.layers.0.mlp.linear_fc1/weight",
    ),
    "an expert of two": (
        replace(EXPERTS, faults=weight_of(f"{EXPERT}.1", 3)),
        (1, 3),
        f"{EXPERT}.1.linear_fc1/weight",
    ),
    "a stage of two": (
        replace(PIPELINE, faults=weight_of("decoder.layers.0.mlp", 2)),
        (2, 3),
        "decoder.layers.0.mlp.linear_fc1/weight",
    ),
    "a tensor's half, of sequences": (
        replace(TENSOR, sequence=True, faults=output_of("decoder.layers.1", 3)),
        (1, 3),
        "decoder.layers.1/output",
    ),
    "a half of the context": (
        replace(Trial(context=2), faults=output_of("decoder.layers.1", 2)),
        (0, 2),
        "decoder.layers.1/output",
    ),
}


ALSO_SPOILED = {
    "a stage's first chunk": (
        replace(VIRTUAL, faults=weight_of("0.decoder.layers.0.mlp", 1)),
        (0, 1),
        "0.module.decoder.layers.0.mlp.linear_fc1/weight",
    ),
    "a layer in shards": (
        replace(FSDP, faults=output_of("module.decoder.layers.1", 2)),
        (2,),
        "decoder.layers.1/output",
    ),
    "a tensor's half": (
        replace(TENSOR, faults=output_of("decoder.layers.1", 3)),
        (1, 3),
        "decoder.layers.1/output",
    ),
    "an expert beside tensors in parts": (
        replace(MIXED, faults=weight_of(f"{EXPERT}.1", 3)),
        (1, 3),
        f"{EXPERT}.1.linear_fc1/weight",
    ),
    "an expert of gathered tokens": (
        replace(GATHERED, faults=weight_of(f"{EXPERT}.1", 3)),
        (1, 3),
        f"{EXPERT}.1.linear_fc1/weight",
    ),
}
SPOILED_OF_EIGHT = {
    "experts, pipeline": (
        replace(LARGE["experts, pipeline"][0], faults=weight_of(f"{EXPERT}.1", 5)),
        (5, 7),
        f"{EXPERT}.1.linear_fc1/weight",
    ),
    "tensor, pipeline": (
        replace(LARGE["tensor, pipeline"][0], faults=output_of("decoder.layers.0", 5)),
        (5, 7),
        "decoder.layers.0/output",
    ),
}


@pytest.mark.slow_cases(
    "a half of the context", "a layer", "a tensor's half, of sequences", "an expert of two"
)
@pytest.mark.parametrize(
    ("trial", "ranks", "surface"), each_of(SPOILED) + each_of(ALSO_SPOILED, pytest.mark.slow)
)
def test_wrong_numbers_name_those_who_have_them(
    four: LiveRanks, trial: Trial, ranks: tuple[int, ...], surface: str, tmp_path: Path
):
    names_who_has(four, trial, ranks, surface, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("trial", "ranks", "surface"), each_of(SPOILED_OF_EIGHT))
def test_wrong_numbers_name_those_who_have_them_where_parallelisms_meet(
    eight: LiveRanks, trial: Trial, ranks: tuple[int, ...], surface: str, tmp_path: Path
):
    names_who_has(eight, trial, ranks, surface, tmp_path)


def names_who_has(live: LiveRanks, trial: Trial, ranks: tuple[int, ...], surface: str, folder: Path) -> None:
    results = live.ask((replace(trial, steps=2), folder), 120)
    assert sum(each.fired for each in results) > 0
    (incident,) = {each.ranks: each for one in results for each in one.incidents}.values()
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", ranks, 2)
    assert surface in {each.surface for each in incident.records}


@pytest.mark.long_cases("optimizer shards")
@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(SHARDED, id="optimizer shards"),
        pytest.param(FSDP, id="parameter shards", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_bit_in_what_one_rank_alone_holds_names_that_rank(
    four: LiveRanks, trial: Trial, tmp_path: Path
):
    results = four.ask((replace(trial, steps=4, spoiled=(1, 2)), tmp_path), 120)
    (incident,) = results[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 3)
    assert {each.surface for each in incident.records} == {"state/owned"}


@pytest.mark.slow
def test_a_wrong_bit_in_one_of_two_instances_names_its_rank_and_what_it_has_spoiled(
    four: LiveRanks, tmp_path: Path
):
    """Its instance has updated parameters with it, and two instances cannot outvote each other."""
    results = four.ask((replace(INSTANCES, steps=4, spoiled=(1, 2)), tmp_path), 120)
    found = {each.ranks: {of.surface for of in each.records} for each in results[0].incidents}
    assert [each.step for each in results[0].incidents] == [3, 3]
    assert found.keys() == {(1,), (0, 1, 2, 3)}
    assert found[(1,)] == {"state/owned"}


COPIES = {"optimizer shards, bfloat16": (Trial(sharded=True, dtype="bfloat16"),)}
MORE_COPIES = {
    "bfloat16": (Trial(dtype="bfloat16"),),
    "optimizer shards": (SHARDED,),
}
LATE = (
    "not watched between updates: overlap_param_gather writes it in the forward pass, and it is watched "
    "from then on"
)


@pytest.mark.parametrize("trial", each_of(COPIES) + each_of(MORE_COPIES, pytest.mark.slow))
def test_a_bit_that_the_next_update_overwrites_names_its_rank(four: LiveRanks, trial: Trial, tmp_path: Path):
    results = four.ask((replace(trial, steps=4, overwritten=(1, 3)), tmp_path), 120)
    (incident,) = results[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 3)
    assert {each.surface for each in incident.records} == {"state/owned"}
    assert all((each.status["replay"]["certified"] or 0) < 3 for each in results)


@pytest.mark.parametrize("trial", each_of(COPIES) + each_of(MORE_COPIES, pytest.mark.slow))
def test_unchanged_working_copies_are_certified(four: LiveRanks, trial: Trial, tmp_path: Path):
    for result in four.ask((replace(trial, steps=4, replay=ReplayConfig(interval=2)), tmp_path), 120):
        assert ([each.sentence for each in result.incidents], result.failures) == ([], [])
        assert (result.status["replay"]["certified"], result.status["replay"]["watched"]) == (4, 1.0)
        assert LATE not in result.status["replay"]["covered"]["missing"]


OVERLAPPING = Trial(sharded=True, dtype="bfloat16", overlap=True, steps=6, replay=ReplayConfig(interval=3))


def test_parameters_gathered_in_the_forward_pass_are_named_as_not_covered(four: LiveRanks, tmp_path: Path):
    for result in four.ask((OVERLAPPING, tmp_path), 120):
        assert ([each.sentence for each in result.incidents], result.failures) == ([], [])
        assert (result.status["replay"]["certified"], result.status["replay"]["watched"]) == (6, 1.0)
        covered = result.status["replay"]["covered"]
        assert "decoder.layers.1.mlp.linear_fc1/weight" in covered["missing"][LATE]
        assert LATE in covered["sentence"]


@pytest.mark.slow_cases("-1")
@pytest.mark.long_cases("0")
@pytest.mark.parametrize("which", [0, -1])
def test_a_bit_that_flips_after_parameters_were_gathered_late_names_its_rank(
    four: LiveRanks, which: int, tmp_path: Path
):
    flip = {"overwritten": (1, 5), "when": "before the second batch", "which": which}
    results = four.ask((replace(OVERLAPPING, **flip), tmp_path), 120)
    (incident,) = results[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 6)
    assert {each.surface for each in incident.records} == {"state/owned"}
    assert all(each.status["replay"]["certified"] == 3 for each in results)


@pytest.mark.long
def test_a_bit_that_a_rank_hands_to_all_others_names_it(four: LiveRanks, tmp_path: Path):
    """What lies in the parts of others is gathered anew, and has no effect."""
    results = four.ask((replace(OVERLAPPING, overwritten=(3, 5), which=None), tmp_path), 120)
    (incident,) = results[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (3,), 6)
    assert {each.surface for each in incident.records} == {"state/owned"}
    assert all(each.status["replay"]["certified"] == 3 for each in results)


LAYERS = ("decoder.layers.0", "decoder.layers.1")
PARTS = [
    f"{layer}.{part}"
    for layer in LAYERS
    for part in ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp.router")
]
SLOW_LAYERS = {
    "replicas": (REPLICAS, LAYERS, (2,)),
}
MORE_SLOW_LAYERS = {
    "one layer of two": (REPLICAS, LAYERS[:1], (2,)),
    "one part of eight": (replace(EXPERTS, steps=18), [f"{LAYERS[0]}.self_attention"], (2,)),
    "tensor and sequence": (Trial(tensor=2, sequence=True), LAYERS, (0, 2)),
    "pipeline": (replace(PIPELINE, layers=4), LAYERS, (2, 3)),
    "virtual pipeline": (VIRTUAL, ["0.decoder.layers.0", "1.decoder.layers.0"], (2, 3)),
    "context": (Trial(context=2), LAYERS, (0, 2)),
    "experts": (
        EXPERTS,
        [f"{layer}.mlp.experts.local_experts.{place}" for layer in LAYERS for place in (0, 1)],
        (0, 2),
    ),
    "parts beside experts": (EXPERTS, PARTS, (2,)),
    "experts, gathered tokens": (GATHERED, PARTS, (2,)),
    "experts, tensor": (MIXED, PARTS, (0, 2)),
    "optimizer shards": (SHARDED, LAYERS, (2,)),
    "two instances": (INSTANCES, LAYERS, (2,)),
    "parameter shards": (FSDP, [f"module.{each}" for each in LAYERS], (2,)),
}
"""What is slow on rank 2, and who is named: of two that do the same work both, since one of them is late and
nothing says which is as it should be."""


@pytest.mark.slow_cases("replicas")
@pytest.mark.parametrize(
    ("trial", "parts", "ranks"), each_of(SLOW_LAYERS) + each_of(MORE_SLOW_LAYERS, pytest.mark.slow)
)
def test_a_slow_layer_names_its_rank(
    four: LiveRanks, trial: Trial, parts: Sequence[str], ranks: tuple[int, ...], tmp_path: Path
):
    names_slow(four, trial, parts, ranks, tmp_path)


def names_slow(
    live: LiveRanks, trial: Trial, parts: Sequence[str], ranks: tuple[int, ...], folder: Path
) -> None:
    faults = FaultPlan()
    for part in parts:
        faults = faults.delay(rank=2, at=f"{part}/forward", step=range(2, 20), seconds=0.25, calls=ALL)
    few = trial.microbatches if trial.virtual else trial.pipeline
    results = live.ask((replace(trial, microbatches=few, faults=faults), folder), 180)
    assert results[2].fired > 4
    (incident,) = {each.ranks: each for one in results for each in one.incidents}.values()
    assert (incident.manifestation.value, incident.ranks) == ("straggler", ranks)
    assert incident.scope.value == ("rank" if len(ranks) == 1 else "peer_group")


SLOW_OF_EIGHT = {
    "tensor, pipeline": (replace(LARGE["tensor, pipeline"][0], layers=4), LAYERS, (0, 2)),
    "experts, pipeline": (
        replace(LARGE["experts, pipeline"][0], layers=4),
        [f"{layer}.mlp.experts.local_experts.{place}" for layer in LAYERS for place in (0, 1)],
        (0, 2),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("trial", "parts", "ranks"), each_of(SLOW_OF_EIGHT))
def test_a_slow_layer_names_its_rank_where_parallelisms_meet(
    eight: LiveRanks, trial: Trial, parts: Sequence[str], ranks: tuple[int, ...], tmp_path: Path
):
    names_slow(eight, trial, parts, ranks, tmp_path)


@pytest.mark.slow
def test_a_slow_layer_names_its_rank_among_those_of_the_same_part(tmp_path: Path):
    place = "decoder.layers.0/forward"
    faults = FaultPlan().delay(rank=3, at=place, step=range(3, 9), seconds=0.25, calls=ALL)
    trial = Trial(tensor=2, layers=1, microbatches=1, faults=faults)
    results = run_ranks(train, 6, trial, tmp_path, timeout=300)
    assert results[3].fired > 2
    (incident,) = results[1].incidents
    assert (incident.manifestation.value, incident.scope.value, incident.ranks) == ("straggler", "rank", (3,))


MORE_LATE = {
    "tensor": (replace(TENSOR, replay=None),),
    "pipeline": (replace(PIPELINE, replay=None),),
    "virtual pipeline": (replace(VIRTUAL, replay=None),),
    "tensor and sequence": (Trial(tensor=2, sequence=True, replay=None),),
    "context": (Trial(context=2, replay=None),),
    "experts": (replace(EXPERTS, replay=None),),
    "experts, gathered tokens": (replace(GATHERED, replay=None),),
    "experts, tensor": (replace(MIXED, replay=None),),
    "optimizer shards": (replace(SHARDED, replay=None),),
    "two instances": (replace(INSTANCES, replay=None),),
    "parameter shards": (replace(FSDP, replay=None),),
}


@pytest.mark.slow_cases("replicas")
@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(replace(REPLICAS, replay=None), id="replicas"),
        *each_of(MORE_LATE, pytest.mark.slow),
        pytest.param(NO_REPLAY, id="no replay", marks=pytest.mark.slow),
    ],
)
def test_a_late_rank_is_named(four: LiveRanks, trial: Trial, tmp_path: Path):
    names_late(four, trial, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor, pipeline", "experts, pipeline"])
def test_a_late_rank_is_named_where_parallelisms_meet(eight: LiveRanks, layout: str, tmp_path: Path):
    names_late(eight, replace(LARGE[layout][0], steps=6, replay=None), tmp_path)


def names_late(live: LiveRanks, trial: Trial, folder: Path) -> None:
    faults = FaultPlan().stall(rank=2, at="step", step=FAULTY_STEP, seconds=STALL)
    results = live.ask((replace(trial, observer=QUICK, faults=faults), folder), 120)
    assert [rank for rank, each in enumerate(results) for _ in range(each.fired)] == [2]
    (incident,) = results[0].incidents
    assert (incident.manifestation.value, incident.scope.value, incident.ranks) == ("hang", "rank", (2,))


ELSEWHERE = {
    "replicas": (REPLICAS, "all_reduce@DATA_PARALLEL_GROUP_WITH_CP", "replica", (1,)),
    "tensor": (Trial(tensor=4), "all_reduce@TENSOR_MODEL_PARALLEL_GROUP", "tensor", (1,)),
    "tensor of two": (TENSOR, "all_reduce@TENSOR_MODEL_PARALLEL_GROUP", "tensor", (0, 1)),
    "tensor and sequence": (
        Trial(tensor=4, sequence=True),
        "reduce_scatter@TENSOR_MODEL_PARALLEL_GROUP",
        "tensor",
        (1,),
    ),
    "context": (Trial(context=4), "all_gather@CONTEXT_PARALLEL_GROUP", "context", (1,)),
    "experts": (replace(EXPERTS, expert=4), "all_to_all@EXPERT_MODEL_PARALLEL_GROUP", "expert", (1,)),
    "experts, gathered tokens": (
        replace(GATHERED, expert=4),
        "all_gather@EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
        "expert",
        (1,),
    ),
    "experts, tensor": (MIXED, "all_to_all@EXPERT_MODEL_PARALLEL_GROUP", "expert", (0, 1)),
    "pipeline": (PIPELINE, "send@PIPELINE_MODEL_PARALLEL_GROUP", "pipeline", (1, 3)),
    "virtual pipeline": (VIRTUAL, "send@PIPELINE_MODEL_PARALLEL_GROUP", "pipeline", (1, 3)),
    "a stage's replicas": (PIPELINE, "all_reduce@DATA_PARALLEL_GROUP_WITH_CP", "replica", (0, 1)),
    "optimizer shards": (SHARDED, "reduce_scatter@DATA_PARALLEL_GROUP_WITH_CP", "replica", (1,)),
    "optimizer shards, gathered": (
        Trial(sharded=True, overlap=True),
        "all_gather@DATA_PARALLEL_GROUP_WITH_CP",
        "replica",
        (1,),
    ),
    "parameter shards": (FSDP, "all_gather@DATA_PARALLEL_GROUP_WITH_CP", "shard", (1,)),
    "parameter shards, scattered": (FSDP, "reduce_scatter@DATA_PARALLEL_GROUP_WITH_CP", "shard", (1,)),
}
"""Where, and who is named: of two that differ, both."""
ELSEWHERE_OF_EIGHT = {
    "tensor, pipeline": (
        Trial(tensor=4, pipeline=2),
        "all_reduce@TENSOR_MODEL_PARALLEL_GROUP",
        "tensor",
        (1,),
    ),
    "pipeline": (PIPELINE, "all_reduce@DATA_PARALLEL_GROUP_WITH_CP", "replica", (1,)),
    "experts, pipeline": (
        replace(EXPERTS, pipeline=2, expert=4),
        "all_to_all@EXPERT_MODEL_PARALLEL_GROUP",
        "expert",
        (1,),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("trial", "at", "axis", "ranks"), each_of(ELSEWHERE))
def test_a_rank_that_does_something_else_is_named(
    trial: Trial, at: str, axis: str, ranks: tuple[int, ...], tmp_path: Path
):
    names_another(4, trial, at, axis, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("trial", "at", "axis", "ranks"), each_of(ELSEWHERE_OF_EIGHT))
def test_a_rank_that_does_something_else_is_named_where_parallelisms_meet(
    trial: Trial, at: str, axis: str, ranks: tuple[int, ...], tmp_path: Path
):
    names_another(8, trial, at, axis, ranks, tmp_path)


def names_another(size: int, trial: Trial, at: str, axis: str, ranks: tuple[int, ...], folder: Path) -> None:
    faults = FaultPlan().change_collective(rank=1, at=at, axis=axis, step=FAULTY_STEP, what="dtype")
    trial = replace(trial, observer=QUICK, replay=None, faults=faults, log=folder / "fired")
    with LiveRanks(answering, size) as live:  # Gloo may abort a process over it, or never return
        live.send((trial, folder))
        wait_for_incident(folder, 60)
    assert (folder / "fired").read_text().count("\n") == 1
    (found,) = {(each.manifestation.value, each.scope.value, each.ranks) for each in incidents(folder)}
    assert found == ("hang", "rank" if len(ranks) == 1 else "process_group", ranks)
