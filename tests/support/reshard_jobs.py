"""A small job in many layouts, whose whole state can be compared whatever the layout.

Every rank trains on the same batch, so that all layouts compute the same updates up to rounding. Sizes are
odd, so that shards are uneven and some are empty.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchscout
from tests.support.checkpoint_folders import flip
from torchscout.checkpoint.storage import shards
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.session.checkpoints.resumption import Resumption

WIDTH, HIDDEN = 3, 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(3)
        )
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Schedule:
    """State that is equal on all ranks."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Loader(Schedule):
    """A position in each rank's own data."""

    def __iter__(self) -> Any:
        return iter(())


@dataclass(frozen=True)
class Job:
    kind: str
    steps: int
    folder: Path
    layout: str | None = None
    has_schedule: bool = True
    local_disks: bool = False
    """Whether each rank has a folder, and memory, of its own."""
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    """The whole state to begin with, in place of a checkpoint."""


@dataclass(frozen=True)
class Outcome:
    resumed: Resumption | None
    loaded: dict[str, torch.Tensor]
    """The whole state after resuming."""
    trained: dict[str, torch.Tensor]
    """The whole state at the end."""
    values: tuple[int, int]
    """Of the schedule and the loader, after resuming."""
    problems: list[str]
    failures: list[str]


def model_of(kind: str) -> nn.Module:
    """The model in this layout, over all ranks."""
    size, model = dist.get_world_size(), Net()
    if kind in ("ddp", "zero"):
        return DistributedDataParallel(model)
    if kind == "plain":
        return model
    mesh = _mesh(kind, size)
    if kind in ("tp", "fsdp_tp"):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
    if kind != "tp":
        inner = mesh["dp"] if kind == "fsdp_tp" else mesh
        for layer in model.layers:
            fully_shard(layer, mesh=inner)
        fully_shard(model, mesh=inner)
    return model


def _mesh(kind: str, size: int) -> Any:
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    if kind == "fsdp_tp":
        return init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp" if kind == "tp" else "shard",))


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = model_of(kind)
    if kind == "zero":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(rank: int, job: Job) -> Outcome:
    """Resume, and train to the end of ``job.steps``."""
    own = job.folder / (f"machine-{rank}" if job.local_disks else "machine")
    os.environ["TORCHSCOUT_MEMORY"] = str(own / "memory")
    model, optimizer = build(job.kind)
    torch.manual_seed(1 + rank)
    schedule, loader = Schedule(), Loader()
    session = torchscout.enable_resiliency(
        model,
        optimizer,
        replay=ReplayConfig(interval=1),
        observer=None,
        checkpoint=CheckpointConfig(own / "checkpoints", persist_every=1, job="resharded"),
        run_dir=job.folder / "run",
        parallelism=_parallelism(job.kind),
    )
    if job.has_schedule:
        session.register_state("schedule", schedule)
    session.register_state("loader", loader)
    with session:
        resumed = session.resume(layout=job.layout) if job.layout else session.resume()
        loaded, values = state_of(model, optimizer), (schedule.value, loader.value)
        for step in range(session.step + 1, job.steps + 1):
            update(model, optimizer, step)
            schedule.value, loader.value = step, step + rank
        problems = session.status()["checkpoint"]["problems"]
        trained = state_of(model, optimizer)
    return Outcome(resumed, loaded, trained, values, problems, session.failures)


def _parallelism(kind: str) -> Any:
    size = dist.get_world_size()
    return _mesh(kind, size) if kind in ("tp", "fsdp_tp") else None


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters, buffers and slots, whole, by name. Every rank calls it."""
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    named = {name.removeprefix("module."): each for name, each in model.named_parameters()}
    found = {**named, **{name.removeprefix("module."): each for name, each in model.named_buffers()}}
    for name, parameter in named.items():
        for slot, value in inner.state.get(parameter, {}).items():
            found[f"{name}.{slot}"] = value
    return {name: _whole(each) for name, each in found.items()}


def load_exported(rank: int, kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """What PyTorch's own functions load into this layout, as docs/checkpoints.md has it."""
    model, optimizer = build(kind)
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    return state_of(model, optimizer)


def damage(shard: Path, tensor: str) -> None:
    """Flip a bit of one tensor in a sealed shard."""
    entry = next(each for each in shards.inspect(shard).entries if each.name == tensor)
    flip(shard, entry.offset)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
