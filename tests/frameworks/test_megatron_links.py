"""The real Megatron-Core: a slow link names the process group that it holds up, in each parallelism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.links import ALL, REMEMBERED, is_named, is_the_jobs, slow
from tests.support.megatron_jobs import Trial, answering
from tests.support.megatron_layouts import (
    EXPERTS,
    FSDP,
    GATHERED,
    LARGE,
    MIXED,
    PIPELINE,
    SHARDED,
    TENSOR,
    VIRTUAL,
)
from tests.support.ranks import LiveRanks

__all__ = ["answering"]

DATA = "DATA_PARALLEL_GROUP_WITH_CP"
STAGES = Trial(pipeline=3, layers=3, microbatches=3)
"""Of two replicas each: three groups that add up gradients."""
LINKS = {
    "replicas of a stage": (STAGES, f"all_reduce@{DATA}", "replica", (2, 3)),
    "tensor": (TENSOR, "all_reduce@TENSOR_MODEL_PARALLEL_GROUP", "tensor", (2, 3)),
    "tensor and sequence": (
        replace(TENSOR, sequence=True),
        "reduce_scatter@TENSOR_MODEL_PARALLEL_GROUP",
        "tensor",
        (2, 3),
    ),
    "pipeline": (PIPELINE, "send@PIPELINE_MODEL_PARALLEL_GROUP", "pipeline", (1, 4)),
    "virtual pipeline": (VIRTUAL, "send@PIPELINE_MODEL_PARALLEL_GROUP", "pipeline", (1, 4)),
    "context": (Trial(context=2), "all_gather@CONTEXT_PARALLEL_GROUP", "context", (2, 3)),
    "experts": (EXPERTS, "all_to_all@EXPERT_MODEL_PARALLEL_GROUP", "expert", (2, 3)),
    "experts, gathered tokens": (
        GATHERED,
        "all_gather@EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
        "expert",
        (2, 3),
    ),
    "experts, tensor": (MIXED, "all_to_all@EXPERT_MODEL_PARALLEL_GROUP", "tensor", (2, 3)),
    "optimizer shards": (replace(STAGES, sharded=True), f"reduce_scatter@{DATA}", "replica", (2, 3)),
    "parameter shards, tensor": (replace(FSDP, tensor=2), f"all_gather@{DATA}", "shard", (1, 3, 5)),
}
"""Who is slow where. With experts beside tensors the same two are a group of either kind. Of two groups, as
in the last, nothing says which is slow."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trial", "at", "axis", "ranks"), [pytest.param(*each, id=name) for name, each in LINKS.items()]
)
def test_a_slow_link_names_its_process_group(
    six: LiveRanks, trial: Trial, at: str, axis: str, ranks: tuple[int, ...], tmp_path: Path
):
    results = six.ask((replace(trial, faults=slow(ranks, at, axis)), tmp_path), 180)
    is_named(ALL if trial.fsdp else ranks, axis, results)


LINKS_OF_EIGHT = {
    "tensor, pipeline": ("all_reduce@TENSOR_MODEL_PARALLEL_GROUP", "tensor", (2, 3)),
    "experts, pipeline": ("send@PIPELINE_MODEL_PARALLEL_GROUP", "pipeline", (1, 5)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "at", "axis", "ranks"),
    [pytest.param(name, *each, id=name) for name, each in LINKS_OF_EIGHT.items()],
)
def test_a_slow_link_names_its_process_group_where_parallelisms_meet(
    eight: LiveRanks, layout: str, at: str, axis: str, ranks: tuple[int, ...], tmp_path: Path
):
    trial = replace(LARGE[layout][0], steps=6, faults=slow(ranks, at, axis))
    is_named(ranks, axis, eight.ask((trial, tmp_path), 180))


ALONE = {
    "replicas": (Trial(), "all_reduce", "replica"),
    "optimizer shards": (SHARDED, "reduce_scatter", "replica"),
    "parameter shards": (FSDP, "all_gather", "shard"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trial", "operation", "axis"), [pytest.param(*each, id=name) for name, each in ALONE.items()]
)
def test_a_slow_link_among_all_ranks_has_job_scope(
    four: LiveRanks, trial: Trial, operation: str, axis: str, tmp_path: Path
):
    faults = slow(range(4), f"{operation}@{DATA}", axis, first=6)
    trial = replace(trial, steps=10, microbatches=1, replay=REMEMBERED, faults=faults)
    is_the_jobs(operation, four.ask((trial, tmp_path), 120))
