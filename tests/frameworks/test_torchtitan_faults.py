"""TorchTitan's own trainer in each parallelism: slow links, and ranks that issue another collective."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from evaluation.jobs.job import Trial
from evaluation.jobs.titan import CONTEXT, EXPERT, EXPERT_TENSOR, HSDP, INTERLEAVED, PIPELINE, TENSOR, Setup
from tests.support.hangs import incidents, wait_for_incident
from tests.support.links import ALL, REMEMBERED, is_named, is_the_jobs, slow
from tests.support.ranks import LiveRanks, RankError, run_ranks
from tests.support.titan_jobs import Question, answer, answering, needs_host_names
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh
from torchscout.testing.local_ranks import preload

__all__ = ["answering"]

preload("evaluation.jobs.titan_cpu", "torchtitan.models.llama3.config_registry")
pytestmark = pytest.mark.slow
THREE = {"data_parallel_replicate_degree": 3}
REPLICATE = {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}


def setup_of(parallelism: dict[str, object]) -> Setup:
    layers = 6 if "pipeline_parallel_degree" in parallelism else 2
    return Setup(parallelism, layers, is_mixture="expert_parallel_degree" in parallelism)


def test_a_slow_link_names_its_machine(tmp_path: Path):
    """Of three groups of shards, each on a machine of its own; two could only differ."""
    needs_host_names()
    faults = FaultPlan().slow_collective(
        ranks=(2, 3), at="all_gather@mesh_fsdp", axis="shard", step=range(3, 9), seconds=0.4
    )
    trial = Trial(steps=7, interval=1, run_dir=tmp_path, faults=faults)
    reports = run_ranks(answer, 6, Question(setup_of(THREE), trial, machine=2), timeout=300)
    assert reports[2].fired >= 4
    (incident,) = reports[0].incidents
    hosts = [f"machine-{rank // 2}" for rank in range(6)]
    (truth,) = faults.truth(Mesh.grid(replica=3, shard=2, hosts=hosts))
    assert truth.matches(incident), incident.sentence
    assert (incident.ranks, incident.hosts) == ((2, 3), ("machine-1",))


class Link(NamedTuple):
    parallelism: dict[str, object]
    at: str
    axis: str
    ranks: tuple[int, ...]
    """Who is slow."""
    size: int = 6
    """Of the job."""


LINKS = {
    "hsdp": Link(THREE, "all_gather@mesh_fsdp", "shard", (2, 3)),
    "hsdp, replicas": Link(HSDP, "all_reduce@mesh_dp_replicate", "replica", (1, 4)),
    "tensor": Link(TENSOR, "all_gather@mesh_tp", "tensor", (2, 3)),
    "interleaved": Link(INTERLEAVED, "send@mesh_pp", "pipeline", (1, 4)),
    "pipeline, shards": Link(PIPELINE, "reduce_scatter@mesh_fsdp", "shard", (3, 4, 5)),
    "context": Link(CONTEXT, "all_to_all@mesh_cp", "context", (2, 3)),
    "expert": Link(EXPERT, "all_to_all@mesh_ep", "expert", (2, 3)),
    # The same two are a group of either kind.
    "expert, tensor": Link({**EXPERT, **TENSOR}, "all_to_all@mesh_ep", "tensor", (2, 3), 8),
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_a_slow_link_names_its_process_group(request: pytest.FixtureRequest, link: Link, tmp_path: Path):
    """Every rank is on a machine of its own. Of two groups of three nothing says which is slow."""
    needs_host_names()
    live: LiveRanks = request.getfixturevalue({6: "six", 8: "eight"}[link.size])
    trial = Trial(steps=6, interval=1, run_dir=tmp_path, faults=slow(link.ranks, link.at, link.axis))
    reports = live.ask(Question(setup_of(link.parallelism), trial, machine=1), 300)
    is_named(ALL if len(link.ranks) == 3 else link.ranks, link.axis, reports)


@pytest.mark.parametrize(
    ("parallelism", "operation", "axis"),
    [(REPLICATE, "all_reduce", "replica"), ({}, "reduce_scatter", "shard")],
    ids=["replicate", "fsdp"],
)
def test_a_slow_link_among_all_ranks_has_job_scope(
    four: LiveRanks, parallelism: dict[str, object], operation: str, axis: str, tmp_path: Path
):
    trial = Trial(
        steps=10,
        interval=1,
        run_dir=tmp_path,
        replay={"recipes": REMEMBERED.recipes, "baseline": REMEMBERED.baseline},
        faults=slow(range(4), f"{operation}@default_pg", axis, first=6),
    )
    is_the_jobs(operation, four.ask(Question(setup_of(parallelism), trial), 300))


class Otherwise(NamedTuple):
    """Rank 2 issues another collective than the others of its group."""

    parallelism: dict[str, object]
    at: str
    axis: str
    group: tuple[int, ...] = ()
    """Where it has but two members, they are what can be named."""
    ranks: int = 4
    what: str = "dtype"


# An axis over all ranks has no group of its own in PyTorch, but the default one.
OTHERWISE = {
    "replicate": Otherwise(REPLICATE, "all_reduce@default_pg", "replica", what="shape"),
    "fsdp": Otherwise({}, "reduce_scatter@default_pg", "shard"),
    "hsdp, replicas": Otherwise(THREE, "all_reduce@mesh_dp_replicate", "replica", ranks=6),
    "tensor": Otherwise(TENSOR, "all_gather@mesh_tp", "tensor", group=(2, 3)),
    "context": Otherwise(CONTEXT, "all_to_all@mesh_cp", "context", group=(2, 3)),
    "pipeline, shards": Otherwise(PIPELINE, "reduce_scatter@mesh_fsdp", "shard", group=(2, 3)),
    "interleaved": Otherwise(INTERLEAVED, "send@mesh_pp", "pipeline", group=(0, 2)),
    "expert": Otherwise(EXPERT, "all_to_all@mesh_ep", "expert", group=(2, 3)),
    "expert 4, tensor": Otherwise(EXPERT_TENSOR, "all_to_all@mesh_ep", "expert", ranks=8),
}


@pytest.mark.parametrize("job", OTHERWISE.values(), ids=OTHERWISE)
def test_a_rank_that_does_something_else_is_named(job: Otherwise, tmp_path: Path):
    faults = FaultPlan().change_collective(rank=2, at=job.at, axis=job.axis, step=4, what=job.what)
    trial = Trial(steps=5, interval=100, run_dir=tmp_path, faults=faults, min_silence_seconds=2.0)
    setup = replace(setup_of(job.parallelism), layers=4 if job.parallelism is INTERLEAVED else 2)
    with suppress(RankError):  # Gloo may abort a process over it, or never return
        reports = run_ranks(answer, job.ranks, Question(setup, trial), timeout=60)
        assert reports[2].fired == 1
    wait_for_incident(tmp_path)
    scope = "process_group" if job.group else "rank"
    seen = {(each.manifestation.value, each.scope.value, each.ranks) for each in incidents(tmp_path)}
    assert seen == {("hang", scope, job.group or (2,))}, [each.sentence for each in incidents(tmp_path)]
