"""What goes wrong in a job of TorchTitan's is named: wrong numbers, slow layers and links, late ranks."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import titan_layouts
from tests.support.hangs import incidents, wait_for_incident
from tests.support.ranks import LiveRanks, RankError, run_ranks
from tests.support.titan_jobs import Trial, answering, train
from tests.support.titan_layouts import (
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    HSDP,
    INTERLEAVED,
    PATIENT,
    PIPELINE,
    PIPELINE_TENSOR,
    REPLICATE,
    TENSOR,
    Layout,
    layouts,
    live,
)
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

__all__ = ["answering"]

assets = titan_layouts.assets
slow = pytest.mark.slow
ALL = None


@pytest.mark.long_cases("fsdp")
@layouts("fsdp")
def test_a_wrong_number_names_the_rank_and_nothing_is_kept_after_it(
    request: pytest.FixtureRequest, layout: Layout, assets: Path, tmp_path: Path
):
    """Training itself is right; what is computed again between steps is not."""
    again = range(layout.called, 200)
    faults = FaultPlan().flip_bit(rank=2, at=f"{layout.layer}/output", step=2, bit=20, calls=again)
    trial = layout.trial(assets, steps=3, faults=faults, directory=tmp_path / "kept")
    results = live(request, layout).ask((trial, tmp_path / "scout"), 300)
    assert results[2].fired
    assert results[0].found == {("sdc", *layout.found)}, [each.sentence for each in results[0].incidents]
    assert {each.status["checkpoint"]["latest"] for each in results} == {1}


@pytest.mark.long_cases("3")
@pytest.mark.parametrize("place", [*(pytest.param(each, marks=slow) for each in range(3)), 3])
def test_no_optimizer_of_any_part_goes_unwatched(four: LiveRanks, place: int, assets: Path, tmp_path: Path):
    """Two parts on a rank, with two optimizers each."""
    trial = Trial(assets, INTERLEAVED, layers=4, steps=3, kinds=True, spoiled=(1, 2, place))
    results = four.ask((trial, tmp_path), 200)
    (incident,) = results[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 3)
    assert {each.surface for each in incident.records} == {"state/owned"}


@pytest.mark.slow_cases("replicate")
@layouts("replicate")
def test_a_slow_layer_names_its_rank(
    request: pytest.FixtureRequest, layout: Layout, assets: Path, tmp_path: Path
):
    faults = FaultPlan()
    for layer in layout.slowed:
        faults = faults.delay(rank=2, at=f"{layer}/forward", step=range(3, 9), seconds=0.3, calls=ALL)
    results = live(request, layout).ask((layout.trial(assets, layers=4, faults=faults), tmp_path), 300)
    assert results[2].fired >= 8
    named = {each for one in results for each in one.found}
    assert named == {("straggler", *layout.found)}, [each.sentence for each in results[0].incidents]


@slow
def test_a_slow_link_names_its_machine(assets: Path, tmp_path: Path):
    """Of three groups of shards, each on a machine of its own; two could only differ."""
    if subprocess.run(["unshare", "--uts", "true"], check=False).returncode != 0:
        pytest.skip("ranks cannot have host names of their own here")
    faults = FaultPlan().slow_collective(
        ranks=(2, 3), at="all_gather@mesh_fsdp", axis="shard", step=range(3, 9), seconds=0.4
    )
    trial = Trial(assets, {"data_parallel_replicate_degree": 3}, steps=7, faults=faults, machine=2)
    results = run_ranks(train, 6, trial, tmp_path, timeout=300)
    assert results[2].fired >= 4
    (incident,) = results[0].incidents
    hosts = [f"machine-{rank // 2}" for rank in range(6)]
    (truth,) = faults.truth(Mesh.grid(replica=3, shard=2, hosts=hosts))
    assert truth.matches(incident), incident.sentence
    assert (incident.ranks, incident.hosts) == ((2, 3), ("machine-1",))


@pytest.mark.slow_cases("fsdp")
@layouts("fsdp")
def test_a_late_rank_is_named(request: pytest.FixtureRequest, layout: Layout, assets: Path, tmp_path: Path):
    faults = FaultPlan().stall(rank=2, at=f"{layout.layer}/forward", step=4, seconds=10.0)
    trial = layout.trial(assets, steps=5, faults=faults, replay=None, observer=PATIENT)
    results = live(request, layout).ask((trial, tmp_path), 240)
    assert results[2].fired == 1
    assert results[0].found == {("hang", "rank", (2,))}, [each.sentence for each in results[0].incidents]


@dataclass(frozen=True, slots=True)
class Otherwise:
    """Rank 2 issues another collective than the others of its group."""

    parallelism: dict[str, Any]
    at: str
    axis: str
    what: str = "dtype"
    group: tuple[int, ...] = ()
    """Where it has but two members, they are what can be named."""
    ranks: int = 4
    is_mixture: bool = False


# An axis over all ranks has no group of its own in PyTorch, but the default one.
OTHERWISE = {
    "replicate": Otherwise(REPLICATE, "all_reduce@default_pg", "replica", "shape"),
    "fsdp": Otherwise({}, "reduce_scatter@default_pg", "shard"),
    "hsdp, shards": Otherwise(HSDP, "reduce_scatter@mesh_fsdp", "shard", group=(2, 3)),
    "hsdp, replicas": Otherwise(
        {"data_parallel_replicate_degree": 3}, "all_reduce@mesh_dp_replicate", "replica", ranks=6
    ),
    "tensor": Otherwise(TENSOR, "all_gather@mesh_tp", "tensor", group=(2, 3)),
    "tensor 4": Otherwise({"tensor_parallel_degree": 4}, "reduce_scatter@default_pg", "tensor"),
    "context": Otherwise(CONTEXT, "all_to_all@mesh_cp", "context", group=(2, 3)),
    "context 4": Otherwise({"context_parallel_degree": 4}, "all_to_all@default_pg", "context"),
    "pipeline": Otherwise(PIPELINE, "send@mesh_pp", "pipeline", group=(0, 2)),
    "pipeline, shards": Otherwise(PIPELINE, "reduce_scatter@mesh_fsdp", "shard", group=(2, 3)),
    "interleaved": Otherwise(INTERLEAVED, "send@mesh_pp", "pipeline", group=(0, 2)),
    "interleaved, shards": Otherwise(INTERLEAVED, "reduce_scatter@mesh_fsdp", "shard", group=(2, 3)),
    "expert": Otherwise(EXPERT, "all_to_all@mesh_ep", "expert", group=(2, 3), is_mixture=True),
    "expert 4, tensor": Otherwise(EXPERT_TENSOR, "all_to_all@mesh_ep", "expert", ranks=8, is_mixture=True),
    "pipeline, tensor": Otherwise(PIPELINE_TENSOR, "reduce_scatter@mesh_tp", "tensor", group=(2, 3), ranks=8),
}


@slow
@pytest.mark.parametrize("job", OTHERWISE.values(), ids=OTHERWISE)
def test_a_rank_that_does_something_else_is_named(job: Otherwise, assets: Path, tmp_path: Path):
    faults = FaultPlan().change_collective(rank=2, at=job.at, axis=job.axis, step=4, what=job.what)
    trial = Trial(
        assets,
        job.parallelism,
        steps=5,
        layers=4 if job.parallelism is INTERLEAVED else 2,
        is_mixture=job.is_mixture,
        faults=faults,
        log=tmp_path / "fired",
        replay=None,
        observer=PATIENT,
    )
    with suppress(RankError):  # Gloo may abort a process over it, or never return
        run_ranks(train, job.ranks, trial, tmp_path, timeout=60)
    assert (tmp_path / "fired").read_text().count("\n") == 1
    wait_for_incident(tmp_path)
    found = {(each.manifestation.value, each.scope.value, each.ranks) for each in incidents(tmp_path)}
    scope = "process_group" if job.group else "rank"
    assert found == {("hang", scope, job.group or (2,))}, [each.sentence for each in incidents(tmp_path)]
