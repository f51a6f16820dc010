"""Jobs whose state changes by itself at any step, between two updates, where nobody has a copy of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.replayed_job import Net, batch, device
from tests.support.sharded_jobs import SHARDINGS
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism, ReplayConfig
from torchscout.decision.record import Incident
from torchscout.faults.effects import FlipBit

__all__ = ["Rested", "Resting", "resting"]


@dataclass(frozen=True, slots=True)
class Resting:
    """One job."""

    run_dir: Path
    layout: str = "fsdp2"
    """Or ``tensor``: one replica, whose ranks all do different work."""
    steps: int = 20
    replay: ReplayConfig = ReplayConfig(interval=5)  # noqa: RUF009  frozen
    flip: tuple[int, int, str] | None = None
    """A rank, the step after whose update one of its bits changes, and of what: ``weight`` or a slot."""
    clipped: str = ""
    """How training writes to a weight between updates: ``counted`` by PyTorch, by ``data``, so ``once``."""


@dataclass(frozen=True, slots=True)
class Rested:
    """What one rank has seen."""

    incidents: list[Incident]
    failures: list[str]
    certified: int | None
    watched: float | None
    held_up: dict[str, str]
    covered: dict[str, object]
    has_flipped: bool


def resting(rank: int, jobs: Iterator[Resting]) -> Iterator[Rested]:
    for job in jobs:
        yield _train(rank, job)


def _train(rank: int, job: Resting) -> Rested:
    torch.manual_seed(0)
    net, parallelism = Net().to(device()), None
    if job.layout == "fsdp2":
        SHARDINGS["plain"](net, init_device_mesh(device(), (dist.get_world_size(),)))
    else:
        parallelism = Parallelism(tensor=dist.get_world_size())
        mesh = init_device_mesh(device(), (dist.get_world_size(),), mesh_dim_names=("tp",))
        for block in net.stack:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    session = enable_resiliency(
        net, optimizer, replay=job.replay, observer=None, parallelism=parallelism, run_dir=job.run_dir
    )
    has_flipped = False
    for step in range(1, job.steps + 1):
        tokens, targets = batch(step, 0 if job.layout == "tensor" else rank)
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if job.flip is not None and job.flip[:2] == (rank, step):
            has_flipped = _flip(net, optimizer, job.flip[2])
        _clip(net.stack[0].up.bias, job.clipped, step)
    dist.barrier()  # whichever rank reports an incident has written it
    replay = session.status()["replay"]
    found = Rested(
        session.incidents,
        list(session.failures),
        session.certified_step,
        replay["watched"],
        replay["held_up"],
        replay["covered"],
        has_flipped,
    )
    session.close()
    return found


def _clip(weight: torch.nn.Parameter, how: str, step: int) -> None:
    with torch.no_grad():
        if how == "counted":
            weight.clamp_(-0.01, 0.01)
        elif how == "data" or (how == "once" and step == 7):
            weight.data.mul_(0.9)


def _flip(net: nn.Module, optimizer: torch.optim.Optimizer, what: str) -> bool:
    """As memory does it: PyTorch does not count it as a write."""
    weight = net.stack[1].up.weight
    tensor = weight if what == "weight" else optimizer.state[weight][what]
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    before = local.clone()
    with torch.autograd._unsafe_preserve_version_counter(local):
        FlipBit(3).corrupt(local)
    return not torch.equal(before, local)
