"""Preflights on ranks of this machine, with faults that enter through hooks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchscout.config import ObserverConfig, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.preflight.command import Options, leave
from torchscout.preflight.runner import Preflight
from torchscout.preflight.workload import Size, Workload

TINY = Size(rows=32, width=32, heads=2, inner=(48,))
GEMM = "layers.gemm_float32_32x32x48"


@dataclass(frozen=True, slots=True)
class Job:
    hosts: tuple[str, ...]
    seconds: float = 8.0
    faults: FaultPlan = field(default_factory=FaultPlan)
    replay: ReplayConfig = ReplayConfig()  # noqa: RUF009  frozen
    observer: ObserverConfig = ObserverConfig(min_silence_seconds=30.0)  # noqa: RUF009  frozen
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Result:
    report: dict[str, Any]
    fired: int


def run(rank: int, job: Job, folder: Path) -> Result:
    """After a hang the report is in the file ``report.json`` of the folder, and the ranks are gone."""
    work = Workload(torch.device(job.device), TINY)
    with Injector(job.faults, rank, work.model, work.optimizer, log=folder / f"fired-{rank}") as injector:
        preflight = Preflight(
            work,
            seconds=job.seconds,
            hosts=job.hosts,
            run_dir=folder / "run",
            replay=job.replay,
            observer=job.observer,
            on_hang=partial(leave, Options(output=folder / "report.json", quiet=True)),
        )
        report = preflight.run().to_json()
    return Result(json.loads(json.dumps(report)), len(injector.fired))
