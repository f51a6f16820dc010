"""Two thousand healthy steps over all meshes, with a check at every one of them: nothing is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import context_jobs, pipeline_jobs, sharded_jobs, tensor_jobs
from tests.support.pipeline_stages import Layout
from tests.support.ranks import run_ranks
from torchscout.faults.plan import FaultPlan

STEPS = 300
SLOW_STEPS = 100
"""Where a step has so many collectives that it takes three times as long."""


def sharded(rank: int, run_dir: Path, shape: tuple[int, ...]) -> Any:
    return sharded_jobs.train(rank, shape, "plain", run_dir, FaultPlan(), STEPS)


def tensor(rank: int, run_dir: Path, trial: tensor_jobs.Trial) -> Any:
    return tensor_jobs.train(rank, trial, run_dir)


def context(rank: int, run_dir: Path, trial: context_jobs.Trial) -> Any:
    return context_jobs.train(rank, trial, run_dir)


def pipeline(rank: int, run_dir: Path, layout: Layout) -> Any:
    return pipeline_jobs.train(rank, layout, run_dir, FaultPlan(), STEPS)


MESHES: dict[str, tuple[Callable[..., Any], int, Any]] = {
    "fsdp2": (sharded, 4, (4,)),
    "hsdp": (sharded, 6, (3, 2)),
    "hsdp of two replicas": (sharded, 4, (2, 2)),
    "tensor": (tensor, 6, tensor_jobs.Trial((3, 2), "plain", steps=STEPS)),
    "sequence": (tensor, 4, tensor_jobs.Trial((2, 2), "distributed", steps=SLOW_STEPS)),
    "fsdp2 x tensor": (tensor, 4, tensor_jobs.Trial((2, 2), "sequence", sharded=True, steps=SLOW_STEPS)),
    "context": (context, 4, context_jobs.Trial((2, 2), "gathered", steps=STEPS)),
    "pipeline": (pipeline, 4, Layout("interleaved", 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_healthy_job_reports_nothing(name: str, tmp_path: Path):
    job, ranks, how = MESHES[name]
    found = run_ranks(job, ranks, tmp_path, how, timeout=1200)
    assert [each.failures for each in found] == [[]] * ranks
    steps = getattr(how, "steps", STEPS)
    assert {max(record.step for record in each.records) for each in found} == {steps}
    reported = tmp_path / "incidents.jsonl"
    assert not reported.exists() or reported.read_text() == ""
