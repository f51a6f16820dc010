"""Jobs whose state changes by itself between two updates, where no other rank has a copy of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.findings import Findings, findings_of
from tests.support.replayed_job import Net, device, flip_in_memory, loss_of
from tests.support.sharded_jobs import SHARDINGS
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism, ReplayConfig


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


def resting(rank: int, jobs: Iterator[Resting]) -> Iterator[Findings]:
    for job in jobs:
        yield _train(rank, job)


def _train(rank: int, job: Resting) -> Findings:
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
    fired = 0
    for step in range(1, job.steps + 1):
        loss = loss_of(net, step, 0 if job.layout == "tensor" else rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if job.flip is not None and job.flip[:2] == (rank, step):
            weight, what = net.stack[1].up.weight, job.flip[2]
            fired += flip_in_memory(weight if what == "weight" else optimizer.state[weight][what], 3)
        _clip(net.stack[0].up.bias, job.clipped, step)
    return Findings(fired=fired, **findings_of(session))


def _clip(weight: torch.nn.Parameter, how: str, step: int) -> None:
    with torch.no_grad():
        if how == "counted":
            weight.clamp_(-0.01, 0.01)
        elif how == "data" or (how == "once" and step == 7):
            weight.data.mul_(0.9)
