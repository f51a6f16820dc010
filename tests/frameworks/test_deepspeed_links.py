"""DeepSpeed as it is shipped: a slow link names the process group that it holds up, in each parallelism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.deepspeed_jobs import Plan, answering
from tests.support.deepspeed_layouts import SOME_SMALL, WITHIN_PAIRS, each_of
from tests.support.links import REMEMBERED, is_named, is_the_jobs, slow
from tests.support.ranks import LiveRanks
from torchscout.mesh import Mesh, MeshAddress

__all__ = ["answering"]

MACHINES = [f"machine-{rank}" for rank in range(6)]


def parts(axis: str) -> Mesh:
    """Three replicas of two neighbours each."""
    return Mesh.grid(replica=3, **{axis: 2}, hosts=MACHINES)


def stages(count: int) -> Mesh:
    """The ranks of a stage are neighbours."""
    width = 6 // count
    return Mesh([MeshAddress(pipeline=rank // width, replica=rank % width) for rank in range(6)], MACHINES)


EXPERTS = Mesh.grid(replica=6, hosts=MACHINES).carve_experts(2)
EXCHANGE, SUM = "all_to_all@mesh_sequence_parallel", "all_reduce@mesh_tensor_parallel"
LINKS = {
    "pipeline": (Plan(1, "pipeline", mesh=stages(2)), "send@default_pg", "pipeline", (1, 4)),
    "pipeline zero-0, a stage": (
        Plan(0, "three_stages", mesh=stages(3)),
        "all_reduce@undefined",
        "replica",
        (2, 3),
    ),
    "pipeline zero-1, a stage": (
        Plan(1, "three_stages", mesh=stages(3)),
        "all_gather@undefined",
        "replica",
        (2, 3),
    ),
    "experts zero-0": (Plan(0, "mixture", mesh=EXPERTS), "all_to_all@undefined", "expert", (2, 3)),
    "experts zero-2": (Plan(2, "mixture", mesh=EXPERTS), "all_to_all@undefined", "expert", (2, 3)),
    "ulysses zero-1": (Plan(1, "ulysses", mesh=parts("context")), EXCHANGE, "context", (2, 3)),
    "ulysses zero-3": (
        Plan(3, "ulysses", zero=SOME_SMALL, mesh=parts("context")),
        EXCHANGE,
        "context",
        (2, 3),
    ),
    "autotp zero-1": (Plan(1, "tensor", mesh=parts("tensor")), SUM, "tensor", (2, 3)),
    "autotp zero-3": (Plan(3, "tensor", zero=SOME_SMALL, mesh=parts("tensor")), SUM, "tensor", (2, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "at", "axis", "ranks"), each_of(LINKS))
def test_a_slow_link_names_its_process_group(
    six: LiveRanks, plan: Plan, at: str, axis: str, ranks: tuple[int, ...], tmp_path: Path
):
    results = six.ask(replace(plan, faults=slow(ranks, at, axis), run_dir=tmp_path), 180)
    is_named(ranks, axis, results)


ALONE = {
    "zero-0": (Plan(0), "all_reduce@undefined"),
    "zero-1": (Plan(1), "all_gather@undefined"),
    "zero-2": (Plan(2, bf16=True), "all_reduce@undefined"),
    "zero-3": (Plan(3, zero=SOME_SMALL), "reduce_scatter@default_pg"),
    "zero-3 hpZ": (Plan(3, zero=WITHIN_PAIRS), "reduce_scatter@default_pg"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "at"), each_of(ALONE))
def test_a_slow_link_among_all_ranks_has_job_scope(four: LiveRanks, plan: Plan, at: str, tmp_path: Path):
    axis = "shard" if plan.stage == 3 else "replica"
    faults = slow(range(4), at, axis, first=6)
    results = four.ask(replace(plan, steps=10, replay=REMEMBERED, faults=faults, run_dir=tmp_path), 120)
    is_the_jobs(at.partition("@")[0], results)
