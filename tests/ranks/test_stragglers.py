"""Slow passes and slow collectives of real jobs. Who is named for which times is in ``tests/scenarios``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.job import Job, Report, Trial
from tests.support.ranks import run_ranks
from torchscout.decision.types import EvidenceRecord
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh


class SpreadJob(Job):
    """Every rank is on a machine of its own."""

    degrees: Mapping[str, int]

    def attach(self, model: Any, optimizer: Any, **settings: Any) -> None:
        super().attach(model, optimizer, **{**settings, "parallelism": mesh_of(self.degrees)})


def mesh_of(degrees: Mapping[str, int]) -> Mesh:
    return Mesh.grid(**degrees, hosts=[f"machine-{rank}" for rank in range(math.prod(degrees.values()))])


def train(rank: int, name: str, degrees: Mapping[str, int], trial: Trial) -> Report:
    job = SpreadJob(rank, trial)
    job.degrees = degrees
    CATALOG[name].train(job)
    return job.finish()


def reports_of(
    name: str, degrees: Mapping[str, int], steps: int, faults: FaultPlan, folder: Path
) -> list[Report]:
    """Train with a check at every step."""
    trial = Trial(steps=steps, interval=1, run_dir=folder, keeps_records=True, faults=faults)
    found = run_ranks(train, math.prod(degrees.values()), name, degrees, trial, timeout=240)
    assert {rank for rank, each in enumerate(found) if each.fired} == {each.rank for each in faults}
    assert not any(each.failures for each in found)
    return found


@pytest.mark.long
def test_a_rank_whose_backward_passes_are_slow_is_named(tmp_path: Path):
    faults = FaultPlan()
    for block in (0, 1):
        at = f"blocks.{block}/backward"
        faults = faults.delay(rank=2, at=at, step=range(4, 10), seconds=0.3, calls=None)
    found = reports_of("nanogpt", {"replica": 3}, 8, faults, tmp_path)
    (incident,), (truth,) = found[0].incidents, faults.truth(mesh_of({"replica": 3}))
    assert truth.matches(incident), incident.sentence
    assert {each.surface for each in incident.records} == {truth.surface}


@pytest.mark.long_cases("hsdp*")
@pytest.mark.slow_cases("tensor-plain*")
@pytest.mark.parametrize(
    ("name", "at", "axis"),
    [("hsdp", "all_gather@mesh_dp_shard", "shard"), ("tensor-plain", "all_reduce@mesh_tp", "tensor")],
)
def test_a_slow_collective_names_its_process_group(name: str, at: str, axis: str, tmp_path: Path):
    """Where one member is slow in a collective, its whole group waits for it."""
    slow = range(4, 6)
    faults = FaultPlan().slow_collective(ranks=[3], at=at, axis=axis, step=slow, seconds=1.0)
    degrees = {"replica": 3, axis: 2}
    found = reports_of(name, degrees, 7, faults, tmp_path)
    (incident,), (truth,) = found[0].incidents, faults.truth(mesh_of(degrees))
    assert truth.matches(incident), (truth, incident.sentence)
    assert (incident.ranks, incident.step in slow) == ((2, 3), True)
    for each in found:
        assert {record.step for record in each.records if is_slow(record)} <= {*slow}, "the next are clean"
        assert {record.status for record in each.numbers} == {"agree"}


def is_slow(record: EvidenceRecord) -> bool:
    """Whether a collective took a second."""
    return record.surface.startswith("time/all_") and max(record.verdict.evidence) > 900
