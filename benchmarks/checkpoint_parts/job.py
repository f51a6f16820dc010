"""What every part measures with: a model of the wanted size, folders in memory, a process group of one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.storage.inventory import Member
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.state.collect import State, StateParts, collect

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
MEMBER = Member(job="job", mesh="", world_size=1, rank=0)

Figures = dict[str, dict[str, Any]]


class Job:
    """A model whose parameters and two slots each are about so large."""

    def __init__(self, megabytes: int) -> None:
        width = 4096 if CUDA else 1024
        layers = max(1, (megabytes << 20) // (3 * 4 * width * width))
        blocks = [
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(layers)
        ]
        self.model = nn.Sequential(*blocks).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.batch = torch.randn(4096 if CUDA else 128, width, device=DEVICE)

    def step(self) -> None:
        self.forward_and_backward()
        self.update()

    def forward_and_backward(self) -> None:
        self.model(self.batch).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        return collect(StateParts(self.model, [self.optimizer], {}))

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def identity(step: int) -> ShardIdentity:
    return MEMBER.at(Generation(step))


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def not_measured(why: str) -> Figures:
    return {"all of it": {"not measured": why}}


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@contextmanager
def in_memory() -> Iterator[Path]:
    """A folder in memory, if there is such a file system."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="torchscout-benchmark-", dir=root) as name:
        yield Path(name)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A process group of this process alone, which ``torch.distributed.checkpoint`` and ``fetch`` ask for."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo", rank=0, world_size=1, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
