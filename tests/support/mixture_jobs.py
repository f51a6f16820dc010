"""A mixture of experts that keeps checkpoints and replays the shapes of a catalog, at every step."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evaluation.jobs.mixture import backward, build, mesh_of
from tests.support.findings import Findings, all_records, findings_of
from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh
from torchscout.session.checkpoints.resumption import Resumption
from torchscout.session.session import Session
from torchscout.testing.moe_model import share_gradients


@dataclass(frozen=True, slots=True)
class Trial:
    ranks: int
    spread: int
    """Ranks that share the experts of one replica."""
    uneven: float = 0.0
    steps: int = 6
    faults: FaultPlan = field(default_factory=FaultPlan)
    replay: ReplayConfig = field(default_factory=lambda: ReplayConfig(interval=1))
    sick: tuple[int, int, int] | None = None
    """A rank that computes other numbers in its experts when they get so many rows, from this step on."""
    directory: Path | None = None
    """Of checkpoints."""
    killed: int | None = None
    """The step in which all ranks end."""
    coverage: str = "full"
    persist_every: int = 10
    written: int | None = None
    """The step whose files are there before all ranks end."""

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.ranks, self.spread)


@dataclass(frozen=True, slots=True)
class Outcome(Findings):
    routed: list[list[int]]
    """Rows that each of this rank's experts got, call by call."""
    resumed: Resumption | None = None
    kept: list[dict[str, Any]] = field(default_factory=list)
    """What is said of checkpoints after every step."""


def train(rank: int, trial: Trial, run_dir: Path) -> Outcome:
    model, holders = build(trial.mesh, rank, trial.uneven)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watched = [_Watched(trial, rank, layer.mixture.experts) for layer in model.module.layer]
    resumed, done = None, 0
    kept: list[dict[str, Any]] = []
    with Injector(trial.faults, rank, model.module, optimizer) as injector:
        session = _attached(trial, model, optimizer, run_dir)
        if trial.directory is not None:
            resumed = session.resume()
            done = resumed.step
        for step in range(done + 1, trial.steps + 1):
            for each in watched:
                each.step = step
            if trial.killed == step:
                if trial.directory is not None and trial.written is not None:
                    _until_in_files(trial.written, trial.directory)
                dist.barrier()
                os._exit(9)
            optimizer.zero_grad()
            backward(model, step, rank)
            share_gradients(model.module, holders)
            if trial.directory is not None:
                _until_written(session, trial.directory)
            optimizer.step()
            if trial.directory is not None:
                kept.append(dict(session.status()["checkpoint"]))
    fired = len(injector.fired) + sum(each.fired for each in watched)
    routed = [counts for each in watched for counts in each.routed]
    return Outcome(routed, resumed, kept, fired=fired, **findings_of(session))


def _attached(
    trial: Trial, model: torch.nn.Module, optimizer: torch.optim.Optimizer, run_dir: Path
) -> Session:
    kept = None
    if trial.directory is not None:
        os.environ["TORCHSCOUT_MEMORY"] = str(trial.directory / "memory")
        folder = trial.directory / "files"
        kept = CheckpointConfig(folder, coverage=trial.coverage, persist_every=trial.persist_every)
    return enable_resiliency(
        model,
        optimizer,
        replay=all_records(trial.replay),
        observer=None,
        checkpoint=kept,
        parallelism=trial.mesh,
        run_dir=run_dir,
    )


def _until_written(session: Session, directory: Path) -> None:
    """A candidate that is not in files by the end of the next cycle would wait for one more."""
    if (candidate := session.status()["checkpoint"]["candidate"]) is not None:
        _until_in_files(candidate, directory)


def _until_in_files(step: int, directory: Path) -> None:
    name, deadline = f"step-{step:010d}.lineage-*/rank-{dist.get_rank()}-of-*.shard", time.monotonic() + 30
    while not [*(directory / "files").glob(name)]:
        assert time.monotonic() < deadline, f"{step} is not written"
        time.sleep(0.01)


class _Watched:
    """The calls of one expert module; the sick rank's are wrong at one number of rows."""

    def __init__(self, trial: Trial, rank: int, experts: torch.nn.Module) -> None:
        self._sick, self._rank = trial.sick, rank
        self.routed: list[list[int]] = []
        self.step, self.fired = 0, 0
        experts.register_forward_hook(self._called)

    def _called(self, _: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        self.routed.append(args[1].tolist())
        if self._sick is None or (self._rank, len(output)) != self._sick[:2] or self.step < self._sick[2]:
            return None
        self.fired += 1
        return output * 1.5
