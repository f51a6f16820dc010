"""The job that each rank of the demo trains."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchscout.adapters.structure import surface_of
from torchscout.attach import enable_resiliency
from torchscout.cli.demo.scenario import STEPS, Scenario
from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.testing.moe_model import MoeTraining, MoeTransformer
from torchscout.testing.transformer import SMALL, Training, Transformer

__all__ = ["Began", "Ended", "Stepped", "surfaces", "train", "train_alone"]

OBSERVER = ObserverConfig(min_silence_seconds=3.0, startup_seconds=120.0, grace_seconds=3.0)


@dataclass(frozen=True, slots=True)
class Began:
    """The checkpoint that training resumed from, and the observer's process number."""

    resumed: dict[str, Any]
    observer: int | None


@dataclass(frozen=True, slots=True)
class Stepped:
    """One training step."""

    step: int
    loss: float
    poisoned: bool
    """Whether corruption was found: nothing that is computed from here on can be trusted."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of training."""

    state: str
    """A digest of everything that training leaves behind on this rank."""
    status: dict[str, Any]
    failures: list[str]


def train(
    rank: int, requests: Iterator[str], scenario: Scenario, faults: FaultPlan, run_dir: Path
) -> Iterator[Began | Stepped | Ended]:
    """Train step by step on request; torchscout checks after each step, and keeps what it certifies."""
    _redirect_output(run_dir)
    training = _training(scenario)
    log = run_dir / f"injected-{rank}.jsonl"
    with (
        Injector(faults, rank, training.model, training.optimizer, log=log) as injector,
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=ReplayConfig(interval=1),
            observer=OBSERVER,
            checkpoint=CheckpointConfig(run_dir / "checkpoints"),
            parallelism=training.parallelism,
            run_dir=run_dir,
        ) as session,
    ):
        for request in requests:
            if request == "begin":
                resumed = session.resume(start_over=True)
                injector.step = session.step + 1
                observer = session.status()["observer"]
                yield Began(asdict(resumed), None if observer is None else observer["pid"])
            elif request == "step":
                loss = training.step(session.step + 1)
                dist.all_reduce(loss, op=dist.ReduceOp.AVG)
                poisoned = session.status()["checkpoint"]["poisoned"] is not None
                yield Stepped(session.step, loss.item(), poisoned)
            else:
                yield Ended(training.digest(), session.status(), session.failures)


def train_alone(rank: int, scenario: Scenario) -> str:  # noqa: ARG001  as all ranks are started
    """Run the same training without faults and without torchscout; return its digest."""
    training = _training(scenario)
    for step in range(1, STEPS + 1):
        training.step(step)
    return training.digest()


def surfaces(scenario: Scenario) -> list[str]:
    """Every weight that the replicas vote on, as MODULE/PARAMETER."""
    model = MoeTransformer() if scenario.has_experts else Transformer(SMALL)
    return [surface_of(name) for name, _ in model.named_parameters()]


def _training(scenario: Scenario) -> Training | MoeTraining:
    if scenario.has_experts:
        return MoeTraining(scenario.mesh())
    return Training(SMALL, replica=scenario.replica, tensor=scenario.tensor, ddp=False)


def _redirect_output(run_dir: Path) -> None:
    """Send the log and errors of ranks to a file; the demo itself reports what happens."""
    logging.basicConfig(format="%(message)s")
    with (run_dir / "ranks.log").open("a") as log:
        os.dup2(log.fileno(), 2)
