"""What each of the demo's ranks runs: training, with torchscout attached."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torchscout.adapters.structure import surface_of
from torchscout.attach import enable_resiliency
from torchscout.cli.demo.model import Transformer, batch, parallelize
from torchscout.cli.demo.stage import STEPS, Stage
from torchscout.cli.moe_job import MoeTraining
from torchscout.cli.moe_model import MoeTransformer
from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan

__all__ = ["Began", "Ended", "Stepped", "surfaces", "train", "train_alone"]

OBSERVER = ObserverConfig(floor_seconds=3.0, start_seconds=120.0, grace_seconds=3.0)


@dataclass(frozen=True, slots=True)
class Began:
    """Where training goes on from, and who watches it."""

    resumed: dict[str, Any]
    observer: int | None
    """Its process."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """One training step."""

    step: int
    loss: float
    poisoned: bool
    """Whether the numbers were found wrong: nothing that is computed from here on can be trusted."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left when training is over."""

    state: str
    """A digest of all that training leaves behind on this rank."""
    status: dict[str, Any]
    failures: list[str]


def train(
    rank: int, questions: Iterator[str], stage: Stage, faults: FaultPlan, run_dir: Path
) -> Iterator[Began | Stepped | Ended]:
    """Train while asked for steps; torchscout checks after each, and keeps what it certifies."""
    _be_quiet(run_dir)
    training = _training(stage)
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
        for question in questions:
            if question == "begin":
                resumed = session.resume(start_over=True)
                injector.step = session.step + 1
                watching = session.watching
                yield Began(asdict(resumed), None if watching is None else watching.observer.pid)
            elif question == "step":
                loss = training.step(session.step + 1)
                poisoned = session.status()["checkpoint"]["poisoned"] is not None
                yield Stepped(session.step, loss, poisoned)
            else:
                yield Ended(training.digest(), session.status(), session.failures)


def train_alone(rank: int, stage: Stage) -> str:  # noqa: ARG001  as all ranks are started
    """The same training, uninterrupted and without torchscout."""
    training = _training(stage)
    for step in range(1, STEPS + 1):
        training.step(step)
    return training.digest()


def surfaces(stage: Stage) -> list[str]:
    """Every weight the replicas vote on."""
    model = MoeTransformer() if stage.has_experts else Transformer()
    return [surface_of(name) for name, _ in model.named_parameters()]


def _training(stage: Stage) -> _Training | MoeTraining:
    return MoeTraining(stage.mesh()) if stage.has_experts else _Training(stage)


class _Training:
    """Ordinary PyTorch, and nothing in it knows of torchscout."""

    def __init__(self, stage: Stage) -> None:
        names = ("replica", "tensor")
        self.parallelism = init_device_mesh("cpu", (stage.replica, stage.tensor), mesh_dim_names=names)
        torch.manual_seed(0)
        self.model = Transformer()
        parallelize(self.model, self.parallelism["tensor"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)

    def step(self, step: int) -> float:
        replicas = self.parallelism["replica"]
        tokens, targets = batch(step, replicas.get_local_rank())
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=replicas.get_group())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        _average_gradients(self.model, replicas)
        self.optimizer.step()
        return mean.item()

    def digest(self) -> str:
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        whole = hashlib.blake2b(digest_size=8)
        for each in [*self.model.parameters(), *slots]:
            local = each.to_local() if isinstance(each, DTensor) else each
            whole.update(local.detach().numpy().tobytes())
        return whole.hexdigest()


def _average_gradients(model: Transformer, replicas: DeviceMesh) -> None:
    """Data parallelism by hand: one all-reduce over all gradients of this rank."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    flat = torch.cat([each.flatten() for each in local])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=replicas.get_group())
    for each, averaged in zip(local, torch.split(flat, [each.numel() for each in local]), strict=True):
        each.copy_(averaged.view_as(each))


def _be_quiet(run_dir: Path) -> None:
    """Whoever watches the demo is told what happens once, by the demo; the rest goes to a file."""
    logging.basicConfig(format="%(message)s")
    with (run_dir / "ranks.log").open("a") as log:
        os.dup2(log.fileno(), 2)
