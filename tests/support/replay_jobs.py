"""Small jobs under replay, one step at a time, and what was recorded about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from tests.support.findings import all_records, evidence_of
from tests.support.replayed_job import Net, loss_of
from torchscout.attach import enable_resiliency
from torchscout.config import ReplayConfig
from torchscout.decision.types import EvidenceRecord, Manifestation
from torchscout.session.session import Session
from torchscout.utils.reentrancy import in_own_work

EVERY_STEP = ReplayConfig(interval=1, records="all")


class Job:
    """An ordinary DDP job of a small net; every rank has batches of its own."""

    def __init__(self, rank: int, net: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.rank, self.step = rank, 0
        self.net = Net() if net is None else net
        self.model: nn.Module = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    @property
    def length(self) -> int:
        """Return the length of the sequences of this step."""
        return 8

    def attach(self, run_dir: Path, replay: ReplayConfig | None = EVERY_STEP, **settings: Any) -> Session:
        settings = {"observer": None, **settings}
        return enable_resiliency(
            self.model, self.optimizer, replay=all_records(replay), run_dir=run_dir, **settings
        )

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.forward().backward()
            self.optimizer.step()

    def forward(self) -> torch.Tensor:
        self.step += 1
        self.optimizer.zero_grad()
        return loss_of(self.model, self.step, self.rank, length=self.length)


class GridJob:
    """Four replicas of a net that is split over two tensor-parallel ranks; gradients averaged by hand."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.axes: DeviceMesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replica", "tensor"))
        self.net, self.step = Net(), 0
        for block in self.net.stack:
            parallelize_module(
                block, self.axes["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, foreach=False)

    def attach(self, run_dir: Path, replay: ReplayConfig = EVERY_STEP) -> Session:
        return enable_resiliency(
            self.net,
            self.optimizer,
            replay=all_records(replay),
            observer=None,
            parallelism=self.axes,
            run_dir=run_dir,
        )

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            self.optimizer.zero_grad()
            loss_of(self.net, self.step, self.axes["replica"].get_local_rank()).backward()
            for parameter in self.net.parameters():
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(local, op=dist.ReduceOp.AVG, group=self.axes.get_group("replica"))
            self.optimizer.step()


def in_replay(module: nn.Module, act: Callable[[], Any]) -> RemovableHandle:
    """Call ``act`` whenever a replay, and not training, has called the module."""
    return module.register_forward_hook(lambda *_: act() if in_own_work() else None)


def records(run_dir: Path, rank: int) -> list[EvidenceRecord]:
    """Return the recorded comparisons of numbers; those of times depend on the machine's load."""
    return [each for each in evidence_of(run_dir, rank) if each.manifestation is Manifestation.SDC]


def steps_of(found: Iterable[EvidenceRecord], surface: str) -> list[int]:
    """Return the steps at which a surface was compared, or was to be."""
    return sorted({record.step for record in found if record.surface.endswith(surface)})


def differing(found: Iterable[EvidenceRecord]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that each surface names on which peers disagree."""
    return {record.surface: record.ranks for record in found if record.scope is not None}


def reasons(found: Iterable[EvidenceRecord], surface: str) -> set[str]:
    """Return the reasons why a surface was not checked."""
    return {str(each.reason) for each in found if each.surface == surface and each.verdict is None}


def bytes_of(tensors: Iterable[torch.Tensor]) -> bytes:
    return b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)


def hooks_of(net: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[int]:
    """Count the hooks on modules and optimizers."""
    registries = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    counts = [len(getattr(each, name)) for each in net.modules() for name in registries]
    return counts + [
        len(each._optimizer_step_pre_hooks) + len(each._optimizer_step_post_hooks) for each in optimizers
    ]
