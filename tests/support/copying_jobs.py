"""Replicas in bfloat16 whose optimizer updates float32 masters, and writes the parameters from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.support.findings import Findings, findings_of
from tests.support.memory_faults import flip_in_memory
from tests.support.replayed_job import Net, batch
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism, ReplayConfig

__all__ = ["Copying", "MasterAdamW", "copying"]


class MasterAdamW(torch.optim.AdamW):
    """AdamW with float32 masters of bfloat16 parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        self._parameters = list(parameters)
        masters = [nn.Parameter(each.detach().float()) for each in self._parameters]
        super().__init__(masters, lr=lr)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        (group,) = self.param_groups
        pairs = list(zip(self._parameters, group["params"], strict=True))
        for parameter, master in pairs:
            master.grad = parameter.grad.float() if parameter.grad is not None else None
        super().step()
        for parameter, master in pairs:
            parameter.data.copy_(master)


@dataclass(frozen=True, slots=True)
class Copying:
    """One job of 20 steps."""

    run_dir: Path
    flip: tuple[int, int] | None = None
    """A rank, and the step before whose forward pass one bit of its working copies changes."""
    receives: str = ""
    """When rank 1 receives other weights from rank 0, before a forward pass: ``once`` or ``always``."""


def copying(rank: int, jobs: Iterator[Copying]) -> Iterator[Findings]:
    for job in jobs:
        yield _train(rank, job)


def _train(rank: int, job: Copying) -> Findings:
    torch.manual_seed(0)
    net = Net().bfloat16()
    optimizer = MasterAdamW([*net.parameters()], lr=1e-3)
    session = enable_resiliency(
        net,
        optimizer,
        replay=ReplayConfig(interval=5),
        observer=None,
        parallelism=Parallelism(replica=dist.get_world_size()),
        run_dir=job.run_dir,
    )
    fired, weight = 0, net.stack[1].up.weight
    for step in range(1, 21):
        if job.flip == (rank, step):
            fired += flip_in_memory(weight, 9)
        if job.receives == "always" or (job.receives == "once" and step == 7):
            _receive(rank, weight.data)
        tokens, targets = batch(step, rank)
        optimizer.zero_grad()
        net.zero_grad()
        nn.functional.cross_entropy(net(tokens).flatten(0, 1).float(), targets.flatten()).backward()
        for each in net.parameters():
            dist.all_reduce(each.grad)
        optimizer.step()
    return Findings(fired=fired, **findings_of(session))


def _receive(rank: int, weight: torch.Tensor) -> None:
    """Send other weights from rank 0 to rank 1, which computes with them until the next update."""
    if rank == 0:
        dist.send(2 * weight, 1)
    elif rank == 1:
        dist.recv(weight, 0)
