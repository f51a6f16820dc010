"""Replicas that do not hold copies of everything: sharded by hand, local, or only on some ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.support.findings import Findings, findings_of
from tests.support.memory_faults import flip_in_memory
from tests.support.replayed_job import Block, Net, batch
from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, Parallelism, ReplayConfig

__all__ = ["Owning", "owning"]


class SlicedAdamW(torch.optim.Optimizer):
    """Each rank keeps the averages of its slice, updates that, and gathers the others'; no DDP."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # noqa: ARG002
        rank, size = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
                count = -(-parameter.numel() // size)
                flat = torch.zeros(size * count)
                flat[: parameter.numel()] = parameter.flatten()
                gradient = torch.zeros(size * count)
                gradient[: parameter.numel()] = parameter.grad.flatten() / size
                own = slice(rank * count, (rank + 1) * count)
                state = self.state[parameter]
                average = state.setdefault("exp_avg", torch.zeros(count))
                square = state.setdefault("exp_avg_sq", torch.zeros(count))
                average.lerp_(gradient[own], 0.1)
                square.lerp_(gradient[own] ** 2, 0.01)
                mine = flat[own] - group["lr"] * average / (square.sqrt() + 1e-8)
                parts = [torch.empty(count) for _ in range(size)]
                dist.all_gather(parts, mine)
                parameter.copy_(torch.cat(parts)[: parameter.numel()].view_as(parameter))


@dataclass(frozen=True, slots=True)
class Owning:
    """One job."""

    run_dir: Path
    steps: int = 20
    is_sliced: bool = False
    is_local: bool = False
    """Whether every rank keeps a bias of its own."""
    extra: tuple[int, ...] = ()
    """Ranks with one more layer, which is not trained."""
    keeps: bool = False
    """Whether the session keeps checkpoints."""
    flip: tuple[int, int, str] | None = None
    """A rank, the step after whose update one of its bits changes, and of what: ``weight`` or a slot."""


def owning(rank: int, jobs: Iterator[Owning]) -> Iterator[Findings]:
    for job in jobs:
        yield _train(rank, job)


def _train(rank: int, job: Owning) -> Findings:
    torch.manual_seed(0)
    os.environ["TORCHSCOUT_MEMORY"] = str(job.run_dir / "memory")
    net = Net()
    if rank in job.extra:
        net.stack.append(Block().requires_grad_(False))
    if job.is_local:
        nn.init.constant_(net.head.bias, float(rank))
    trained = [each for each in net.parameters() if each.requires_grad]
    shared = [each for each in trained if not (job.is_local and each is net.head.bias)]
    make = SlicedAdamW if job.is_sliced else torch.optim.AdamW
    optimizer = make(trained, lr=1e-3)
    session = enable_resiliency(
        net,
        optimizer,
        replay=ReplayConfig(interval=5),
        observer=None,
        checkpoint=CheckpointConfig(job.run_dir / "checkpoints") if job.keeps else None,
        parallelism=Parallelism(replica=dist.get_world_size()),
        run_dir=job.run_dir,
    )
    fired = 0
    for step in range(1, job.steps + 1):
        tokens, targets = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()
        for each in [] if job.is_sliced else shared:
            dist.all_reduce(each.grad)
        optimizer.step()
        if job.flip is not None and job.flip[:2] == (rank, step):
            weight = net.stack[1].up.weight
            tensor = weight.detach() if job.flip[2] == "weight" else optimizer.state[weight][job.flip[2]]
            fired += flip_in_memory(tensor.flatten()[-1:], 18)  # of rank 2's slice
    return Findings(fired=fired, **findings_of(session))
