"""TorchTitan's own trainer: a slow link names the process group that it holds up, in each parallelism."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.links import ALL, REMEMBERED, is_named, is_the_jobs, slow
from tests.support.ranks import LiveRanks
from tests.support.titan_jobs import Trial, answering
from tests.support.titan_layouts import (
    CONTEXT,
    EXPERT,
    FULL,
    INTERLEAVED,
    PIPELINE,
    PIPELINE_TENSOR,
    REPLICATE,
    TENSOR,
    assets,
)

__all__ = ["answering", "assets"]

THREE, TWO = ({"data_parallel_replicate_degree": count} for count in (3, 2))
EXPERT_PAIRS = {**EXPERT, **TENSOR}


class Link(NamedTuple):
    parallelism: Mapping[str, Any]
    at: str
    axis: str
    ranks: tuple[int, ...]
    """Who is slow."""
    size: int = 6
    """Of the job."""


LINKS = {
    "hsdp": Link(THREE, "all_gather@mesh_fsdp", "shard", (2, 3)),
    "hsdp, replicas": Link(TWO, "all_reduce@mesh_dp_replicate", "replica", (1, 4)),
    "tensor": Link(TENSOR, "all_gather@mesh_tp", "tensor", (2, 3)),
    "full_dtensor": Link(FULL, "all_gather@mesh_tp", "tensor", (2, 3)),
    "pipeline": Link(PIPELINE, "send@mesh_pp", "pipeline", (1, 4)),
    "interleaved": Link(INTERLEAVED, "send@mesh_pp", "pipeline", (1, 4)),
    "pipeline, shards": Link(PIPELINE, "reduce_scatter@mesh_fsdp", "shard", (3, 4, 5)),
    "context": Link(CONTEXT, "all_to_all@mesh_cp", "context", (2, 3)),
    "expert": Link(EXPERT, "all_to_all@mesh_ep", "expert", (2, 3)),
    "pipeline, tensor": Link(PIPELINE_TENSOR, "reduce_scatter@mesh_tp", "tensor", (2, 3), 8),
    "expert, tensor": Link(EXPERT_PAIRS, "all_to_all@mesh_ep", "tensor", (2, 3), 8),
}
"""In the last the same two are a group of either kind."""


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_a_slow_link_names_its_process_group(
    request: pytest.FixtureRequest, link: Link, assets: Path, tmp_path: Path
):
    """Every rank is on a machine of its own. Of two groups of three nothing says which is slow."""
    if subprocess.run(["unshare", "--uts", "true"], check=False).returncode != 0:
        pytest.skip("ranks cannot have host names of their own here")
    live: LiveRanks = request.getfixturevalue({6: "six", 8: "eight"}[link.size])
    layers = 6 if "pipeline_parallel_degree" in link.parallelism else 2
    trial = Trial(
        assets,
        link.parallelism,
        layers=layers,
        is_mixture="expert_parallel_degree" in link.parallelism,
        faults=slow(link.ranks, link.at, link.axis),
        machine=1,
    )
    results = live.ask((trial, tmp_path), 240)
    is_named(ALL if len(link.ranks) == 3 else link.ranks, link.axis, results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelism", "operation", "axis"),
    [
        pytest.param(REPLICATE, "all_reduce", "replica", id="replicate"),
        pytest.param({}, "reduce_scatter", "shard", id="fsdp"),
    ],
)
def test_a_slow_link_among_all_ranks_has_job_scope(
    four: LiveRanks, parallelism: Mapping[str, Any], operation: str, axis: str, assets: Path, tmp_path: Path
):
    faults = slow(range(4), f"{operation}@default_pg", axis, first=6)
    trial = Trial(assets, parallelism, steps=10, replay=REMEMBERED, faults=faults)
    is_the_jobs(operation, four.ask((trial, tmp_path), 240))
