"""What each of the demo's eight ranks runs: training, with torchscout attached."""

from __future__ import annotations

import hashlib
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torchscout.cli.demo.model import Transformer, batch, parallelize
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.faults.fault import Faults
from torchscout.faults.injector import Firing, Injector
from torchscout.integration.attach import enable_resiliency
from torchscout.integration.structure import surface_of

__all__ = ["RANKS", "REPLICAS", "SHARDS", "STEPS", "Outcome", "surfaces", "train", "train_alone"]

REPLICAS, SHARDS, STEPS = 4, 2, 10
RANKS = REPLICAS * SHARDS


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank has to tell."""

    losses: list[float]
    fired: list[Firing]
    status: dict[str, Any]
    """Of the session, at the end."""
    resumed: dict[str, Any]
    """Where it went on from."""
    state: str
    """A digest of all that training leaves behind on this rank."""


def train(rank: int, faults: Faults, run_dir: Path, again: bool = False) -> Outcome:
    """Train up to ``STEPS`` steps; torchscout checks after each, and keeps what it certifies.

    A job whose numbers are found wrong stops; begun again, it goes on from what can be trusted.
    """
    logging.basicConfig(format="          %(message)s")  # who reports an incident says so at once
    torch.manual_seed(0)
    axes = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replica", "tensor"))
    model = Transformer()
    parallelize(model, axes["tensor"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    every_step = ReplayConfig(interval=1)
    with (
        Injector(faults, rank, model, optimizer) as injector,
        enable_resiliency(
            model,
            optimizer,
            replay=every_step,
            observer=None,
            checkpoint=CheckpointConfig(run_dir / "checkpoints"),
            parallelism=axes,
            run_dir=run_dir,
        ) as session,
    ):
        resumed, losses = asdict(session.resume(start_over=True)), []
        if again:
            say(f"resumed   {resumed['reason']}", only_on=0)
        for step in range(session.step + 1, STEPS + 1):
            losses.append(train_step(model, optimizer, axes["replica"], step))
            if session.status()["checkpoint"]["poisoned"] is not None:
                say("stopped   nothing that is computed from here on can be trusted", only_on=0)
                break
        status = session.status()
    return Outcome(losses, injector.fired, status, resumed, digest_of(model, optimizer))


def train_alone(rank: int) -> str:  # noqa: ARG001  as all ranks are started
    """The same training, uninterrupted and without torchscout."""
    torch.manual_seed(0)
    axes = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replica", "tensor"))
    model = Transformer()
    parallelize(model, axes["tensor"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    for step in range(1, STEPS + 1):
        train_step(model, optimizer, axes["replica"], step, quiet=True)
    return digest_of(model, optimizer)


def digest_of(model: Transformer, optimizer: torch.optim.Optimizer) -> str:
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in [*model.parameters(), *slots]]
    whole = hashlib.blake2b(digest_size=8)
    for each in local:
        whole.update(each.detach().numpy().tobytes())
    return whole.hexdigest()


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    replicas: DeviceMesh,
    step: int,
    *,
    quiet: bool = False,
) -> float:
    tokens, targets = batch(step, replicas.get_local_rank())
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=replicas.get_group())
    if not quiet:
        say(f"step {step:2}   loss {mean.item():.4f}", only_on=0)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    average_gradients(model, replicas)
    optimizer.step()
    return mean.item()


def average_gradients(model: Transformer, replicas: DeviceMesh) -> None:
    """Data parallelism by hand: one all-reduce over all gradients of this rank."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    flat = torch.cat([each.flatten() for each in local])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=replicas.get_group())
    for each, averaged in zip(local, torch.split(flat, [each.numel() for each in local]), strict=True):
        each.copy_(averaged.view_as(each))


def surfaces() -> list[str]:
    """Every weight the replicas vote on."""
    return [surface_of(name) for name, _ in Transformer().named_parameters()]


def say(line: str, *, only_on: int) -> None:
    if dist.get_rank() == only_on:
        print(line, file=sys.stderr, flush=True)
