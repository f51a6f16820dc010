"""The real Megatron-Core where the contracts of the catalog do not look: what is where, what is refused or
not covered, what one rank alone holds, checkpoints after wrong numbers, collectives of its own groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evaluation.jobs.job import Trial
from evaluation.jobs.megatron import EXPERT, EXPERTS, FSDP, MIXED, VIRTUAL, Built, Setup, build, slot, train
from tests.support.job_ranks import (
    answering,
    ask,
    does_something_else,
    goes_back,
    overwritten,
    seen,
    skips_are_no_updates,
    surfaces,
)
from tests.support.links import is_named, slow
from tests.support.ranks import LiveRanks
from tests.support.scripts import EXAMPLES, losses_in, torchrun
from torchscout.faults.effects import FlipBit
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import LayerKind

__all__ = ["answering"]

SHARDED = Setup(sharded=True)
INSTANCES = Setup(sharded=True, instances=2)
"""Two ranks have the optimizer's state between them, and so have the other two."""


def places_of(_: int, setup: Setup) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Who is along which axis: as torchscout reads it off Megatron, and of Megatron's own groups."""
    built = build(setup)
    from megatron.core import parallel_state as state

    from torchscout.adapters.registry import adapter_for

    mesh = adapter_for(built.chunks, built.optimizer, None).mesh(["machine"] * dist.get_world_size())
    data = "shard" if setup.fsdp else "replica"
    axes = {
        data: (LayerKind.DENSE, state.get_data_parallel_group()),
        "tensor": (LayerKind.DENSE, state.get_tensor_model_parallel_group()),
        "pipeline": (LayerKind.DENSE, state.get_pipeline_model_parallel_group()),
        "context": (LayerKind.DENSE, state.get_context_parallel_group()),
    }
    experts = {
        data: (LayerKind.EXPERT, state.get_expert_data_parallel_group()),
        "tensor": (LayerKind.EXPERT, state.get_expert_tensor_parallel_group()),
        "expert": (LayerKind.EXPERT, state.get_expert_model_parallel_group()),
    }
    wanted = [*axes.items(), *(experts.items() if setup.experts else ())]
    rank = dist.get_rank()
    ours = {f"{kind} {axis}": [*mesh.ranks_along(axis, rank, kind)] for axis, (kind, _) in wanted}
    theirs = {f"{kind} {axis}": sorted(dist.get_process_group_ranks(of)) for axis, (kind, of) in wanted}
    return ours, theirs


@pytest.mark.long
def test_ranks_are_where_megatron_has_them(four: LiveRanks):
    layouts = (Setup(tensor=2), Setup(context=2), VIRTUAL, INSTANCES, FSDP, replace(FSDP, tensor=2), MIXED)
    for setup in (*layouts, replace(EXPERTS, pipeline=2), replace(FSDP, experts=4, expert=2)):
        for ours, theirs in four.ask(partial(places_of, setup=setup), 120):
            assert ours == theirs, setup


REFUSED = {
    "experts in shards": (replace(FSDP, experts=4, expert=2), "off", "Megatron-FSDP"),
    "no peers": (replace(VIRTUAL, pipeline=4, layers=8), "lacking", "same work"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "key", "why"), REFUSED.values(), ids=REFUSED)
def test_an_unsupported_setting_is_reported_and_training_is_unchanged(
    four: LiveRanks, setup: Setup, key: str, why: str, tmp_path: Path
):
    job, trial = partial(train, setup=setup), Trial(steps=2)
    alone, attached = ask(four, job, trial), ask(four, job, replace(trial, run_dir=tmp_path))
    for plain, report in zip(alone, attached, strict=True):
        assert (report.bits, report.failures) == (plain.bits, [])
        assert why in report.status["replay"][key]


@pytest.mark.long
def test_a_skipped_update_ends_a_step_and_is_no_update(four: LiveRanks, tmp_path: Path):
    skips_are_no_updates(ask(four, "megatron-fp16", Trial(steps=6, interval=1, run_dir=tmp_path)))


@pytest.mark.long_cases("optimizer shards")
@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(SHARDED, id="optimizer shards"),
        pytest.param(FSDP, id="parameter shards", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_bit_in_what_one_rank_alone_holds_names_that_rank(
    four: LiveRanks, setup: Setup, tmp_path: Path
):
    found = overwritten(partial(train, setup=setup), slot, four, tmp_path)[0].incidents
    assert (seen(found), surfaces(found)) == ([("sdc", "rank", (1,), 3)], {"state/owned"})


@pytest.mark.slow
def test_a_wrong_bit_in_one_of_two_instances_names_its_rank_and_what_it_has_spoiled(
    four: LiveRanks, tmp_path: Path
):
    """Its instance has updated parameters with it, and two instances cannot outvote each other."""
    found = overwritten(partial(train, setup=INSTANCES), slot, four, tmp_path)[0].incidents
    assert {(each.ranks, each.step) for each in found} == {((1,), 3), ((0, 1, 2, 3), 3)}
    assert surfaces([each for each in found if each.ranks == (1,)]) == {"state/owned"}


@pytest.mark.long_cases("distributed-optimizer")
@pytest.mark.slow_cases("fsdp", "bf16")
@pytest.mark.parametrize("name", ["distributed-optimizer", "fsdp", "bf16"])
def test_all_working_copies_are_watched_between_updates(four: LiveRanks, name: str, tmp_path: Path):
    for report in ask(four, f"megatron-{name}", Trial(steps=4, interval=2, run_dir=tmp_path)):
        assert (report.status["replay"]["certified"], report.status["replay"]["watched"]) == (4, 1.0)
        assert not any("not watched" in why for why in report.status["replay"]["covered"]["missing"])


OVERLAPPING = Setup(sharded=True, dtype="bfloat16", overlap=True)


@pytest.mark.long
def test_parameters_gathered_in_the_forward_pass_are_named_as_not_covered(four: LiveRanks, tmp_path: Path):
    trial = Trial(steps=6, interval=3, run_dir=tmp_path)
    for report in ask(four, partial(train, setup=OVERLAPPING), trial):
        assert (report.incidents, report.failures) == ([], [])
        assert (report.status["replay"]["certified"], report.status["replay"]["watched"]) == (6, 1.0)
        covered = report.status["replay"]["covered"]
        (late,) = [why for why in covered["missing"] if "overlap_param_gather" in why]
        assert "decoder.layers.1.mlp.linear_fc1/weight" in covered["missing"][late]
        assert late in covered["sentence"]


def flip_in_the_middle(built: Built, step: int, rank: int, which: Callable[[Built], torch.Tensor]) -> None:
    """As memory does it: PyTorch does not count it as a write."""
    if (dist.get_rank(), step) == (rank, 5):
        tensor = which(built)
        with torch.autograd._unsafe_preserve_version_counter(tensor):
            assert FlipBit(9).corrupt(tensor.detach()) is not None


def first(built: Built) -> torch.Tensor:
    return next(built.chunks[0].parameters())


def last(built: Built) -> torch.Tensor:
    return [*built.chunks[0].parameters()][-1]


def handed_out(built: Built) -> torch.Tensor:
    """What this rank gives to others when parameters are gathered; their own parts would be gathered anew."""
    gathered = built.chunks[0].bucket_groups[0].buckets[0].param_data
    return gathered.chunk(dist.get_world_size())[dist.get_rank()]


@pytest.mark.long_cases("handed_out-*", "first-*")
@pytest.mark.slow_cases("last-*")
@pytest.mark.parametrize(
    ("which", "rank"),
    [(first, 1), (last, 1), (handed_out, 3)],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_bit_that_flips_in_parameters_that_are_gathered_late_names_its_rank(
    four: LiveRanks, which: Callable[[Built], torch.Tensor], rank: int, tmp_path: Path
):
    trial = Trial(steps=6, interval=3, run_dir=tmp_path)
    if which is handed_out:
        job: Any = partial(train, setup=OVERLAPPING, flips=which)
        trial = replace(trial, flip=(rank, 5))
    else:
        job = partial(train, setup=OVERLAPPING, middle=partial(flip_in_the_middle, rank=rank, which=which))
    reports = ask(four, job, trial)
    found = reports[0].incidents
    assert (seen(found), surfaces(found)) == ([("sdc", "rank", (rank,), 6)], {"state/owned"})
    assert all(each.status["replay"]["certified"] == 3 for each in reports)


def weight(part: str, rank: int) -> Trial:
    """A weight has a wrong bit from the update of step 4 on."""
    return Trial(faults=FaultPlan().flip_bit(rank=rank, at=f"{part}.linear_fc1/weight", step=4, bit=20))


HELD = Trial(flip=(1, 5))
"""A slot has one from the end of step 4 on: it is found when that is checked again."""
EXCLUDED = {
    "replicas": (partial(train), weight("decoder.layers.0.mlp", 1)),
    "virtual pipeline": (partial(train, setup=VIRTUAL), weight("0.decoder.layers.0.mlp", 1)),
    "experts, tensor": (partial(train, setup=MIXED), weight(EXPERT, 3)),
    "optimizer shards": (partial(train, setup=SHARDED, flips=slot), HELD),
    "parameter shards": (partial(train, setup=FSDP, flips=slot), HELD),
}


@pytest.mark.slow
@pytest.mark.parametrize(("job", "spoiled"), EXCLUDED.values(), ids=EXCLUDED)
def test_no_checkpoint_after_wrong_numbers_is_loaded(
    four: LiveRanks, job: Any, spoiled: Trial, tmp_path: Path
):
    goes_back(four, job, spoiled, 5 if spoiled is HELD else 4, tmp_path)


DATA = "DATA_PARALLEL_GROUP_WITH_CP"
EXPERT_DATA = "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
ELSEWHERE = {
    "tensor and sequence": (
        Setup(tensor=4, sequence=True),
        "reduce_scatter@TENSOR_MODEL_PARALLEL_GROUP",
        "tensor",
        (1,),
    ),
    "context": (Setup(context=2), "all_gather@CONTEXT_PARALLEL_GROUP", "context", (0, 1)),
    "experts": (replace(EXPERTS, expert=4), "all_to_all@EXPERT_MODEL_PARALLEL_GROUP", "expert", (1,)),
    "experts, gathered tokens": (
        replace(EXPERTS, expert=4, dispatcher="allgather"),
        f"all_gather@{EXPERT_DATA}",
        "expert",
        (1,),
    ),
    "virtual pipeline": (VIRTUAL, "send@PIPELINE_MODEL_PARALLEL_GROUP", "pipeline", (1, 3)),
    "a stage's replicas": (Setup(pipeline=2), f"all_reduce@{DATA}", "replica", (0, 1)),
    "optimizer shards, gathered": (
        Setup(sharded=True, overlap=True),
        f"all_gather@{DATA}",
        "replica",
        (1,),
    ),
    "parameter shards": (FSDP, f"reduce_scatter@{DATA}", "shard", (1,)),
}
"""Where, and who is named: of two that differ, both."""


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "at", "axis", "ranks"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_rank_that_does_something_else_is_named(
    setup: Setup, at: str, axis: str, ranks: tuple[int, ...], tmp_path: Path
):
    faults = FaultPlan().change_collective(rank=1, at=at, axis=axis, step=5, what="dtype")
    found = does_something_else(4, partial(train, setup=setup), faults, tmp_path)
    scope = "rank" if len(ranks) == 1 else "process_group"
    assert {each[:3] for each in seen(found)} == {("hang", scope, ranks)}, found


LINKS = {
    "replicas of a stage": (
        Setup(pipeline=3, layers=3, microbatches=3, sharded=True),
        f"reduce_scatter@{DATA}",
        "replica",
        (2, 3),
    ),
    "tensor and sequence": (
        Setup(tensor=2, sequence=True),
        "reduce_scatter@TENSOR_MODEL_PARALLEL_GROUP",
        "tensor",
        (2, 3),
    ),
    "virtual pipeline": (VIRTUAL, "send@PIPELINE_MODEL_PARALLEL_GROUP", "pipeline", (1, 4)),
    "context": (Setup(context=2), "all_gather@CONTEXT_PARALLEL_GROUP", "context", (2, 3)),
    "experts": (EXPERTS, "all_to_all@EXPERT_MODEL_PARALLEL_GROUP", "expert", (2, 3)),
    "parameter shards, tensor": (replace(FSDP, tensor=2), f"all_gather@{DATA}", "shard", tuple(range(6))),
}
"""Who is slow where; of two groups, as in the last, nothing says which is slow."""


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "at", "axis", "ranks"), LINKS.values(), ids=LINKS)
def test_a_slow_link_names_its_process_group(
    six: LiveRanks, setup: Setup, at: str, axis: str, ranks: tuple[int, ...], tmp_path: Path
):
    held_up = (1, 3, 5) if len(ranks) == 6 else ranks
    trial = Trial(steps=6, interval=1, run_dir=tmp_path, faults=slow(held_up, at, axis))
    is_named(ranks, axis, ask(six, partial(train, setup=setup, apart=True), trial))


@pytest.mark.slow
def test_the_example_trains_and_goes_on_from_its_checkpoint(tmp_path: Path):
    script = EXAMPLES / "frameworks" / "megatron_core.py"
    assert script.read_text().count("\n") < 60
    losses: dict[int, float] = {}
    for begin in (1, 6):
        printed = losses_in(torchrun(4, ["-m", "evaluation.jobs.megatron_cpu", script], tmp_path))
        assert [*printed] == [*range(begin, begin + 5)]
        losses |= printed
    assert losses[10] < losses[1]
    assert not [*tmp_path.glob("scout-run-*/incidents/*")]
