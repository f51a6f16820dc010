"""Small tensor-parallel jobs, each trained with a check at every step: with and without sequence
parallelism, under replicas, FSDP2 and HSDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.support.replay_jobs import EVERY_STEP
from tests.support.replay_results import Result, bits_of, local_of, result_of
from tests.support.replayed_job import Net, loss_of
from torchscout.attach import enable_resiliency
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.utils.reentrancy import in_own_work

AXES = {1: ("tp",), 2: ("dp", "tp"), 3: ("dp_replicate", "dp_shard", "tp")}


def plain(net: Net, tensor: DeviceMesh) -> None:
    """Layers are split; what goes from block to block is whole on every rank."""
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, tensor, ends)
    for block in net.stack:
        parallelize_module(block, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence(net: Net, tensor: DeviceMesh) -> None:
    """From block to block each rank has its tokens only, as a plain tensor."""
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "final": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, tensor, ends)
    for block in net.stack:
        layers = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, tensor, layers)


def distributed(net: Net, tensor: DeviceMesh) -> None:
    """As ``sequence``, and what goes from block to block, within, and to the loss is a DTensor."""
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "final": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(net, tensor, ends)
    for block in net.stack:
        layers = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(use_local_output=False),
        }
        parallelize_module(block, tensor, layers)
        around = {
            "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "down": PrepareModuleOutput(
                output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),), use_local_output=False
            ),
        }
        parallelize_module(block, tensor, around)


STYLES: dict[str, Callable[[Net, DeviceMesh], None]] = {
    each.__name__: each for each in (plain, sequence, distributed)
}


class Echo:
    """Compares each replayed pass of a block with training's own before it.

    They are the same on the rank whose input it is, if no update lies between them.
    """

    def __init__(self, block: nn.Module) -> None:
        self._training: dict[str, bytes] = {}
        self.outcomes: dict[str, list[bool]] = {"output": [], "gradient": []}
        block.register_forward_hook(lambda _, __, output: self._heard("output", output))
        weight = next(each for name, each in block.named_parameters() if name in ("up.weight", "mix.weight"))
        weight.register_hook(lambda gradient: self._heard("gradient", gradient))

    def _heard(self, what: str, tensor: torch.Tensor) -> None:
        found = local_of(tensor).detach().contiguous().numpy().tobytes()
        if in_own_work():
            self.outcomes[what].append(found == self._training[what])
        else:
            self._training[what] = found


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to train."""

    shape: tuple[int, ...]
    """Replicas and tensor-parallel ranks; with three axes replicas, shards and tensor-parallel ranks."""
    style: str
    sharded: bool = False
    """Whether FSDP2 shards along the axes before the last."""
    steps: int = 12
    rate: float = 1e-3
    """What the optimizer learns."""

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.style}{' under fsdp' if self.sharded else ''}"

    @property
    def ranks(self) -> int:
        return torch.Size(self.shape).numel()


def train(rank: int, trial: Trial, run_dir: Path | None, faults: FaultPlan = FaultPlan()) -> Result:  # noqa: B008
    """Train; without ``run_dir``, without torchscout."""
    warnings.filterwarnings("ignore", message=".*(view tensor|complete support).*")
    torch.manual_seed(0)
    axes = init_device_mesh("cpu", trial.shape, mesh_dim_names=AXES[len(trial.shape)])
    net = Net()
    STYLES[trial.style](net, axes["tp"])
    data = axes[axes.mesh_dim_names[:-1]]
    if trial.sharded:
        for block in net.stack:
            fully_shard(block, mesh=data)
        fully_shard(net, mesh=data)
    optimizer = torch.optim.AdamW(net.parameters(), lr=trial.rate, foreach=False)
    between: set[type] = set()
    net.stack[1].register_forward_pre_hook(lambda _, args: between.add(type(args[0])))
    echo = None if trial.sharded else Echo(net.stack[0])
    with Injector(faults, rank, net, optimizer) as injector:
        session = run_dir and enable_resiliency(
            net,
            optimizer,
            replay=EVERY_STEP,
            observer=None,
            parallelism=None if trial.sharded else axes,
            run_dir=run_dir,
        )
        for step in range(1, trial.steps + 1):
            optimizer.zero_grad()
            with loss_parallel() if trial.style == "distributed" else nullcontext():
                loss_of(net, step, rank // trial.shape[-1]).backward()
            if not trial.sharded:
                average(net, data.get_group())
            optimizer.step()
    found = result_of(bits_of(net, optimizer), session or None, len(injector.fired))
    return replace(found, between=tuple(between), echoes=echo and echo.outcomes)


def average(net: nn.Module, group: dist.ProcessGroup) -> None:
    """Average gradients over the replicas, by hand."""
    for parameter in net.parameters():
        dist.all_reduce(local_of(parameter.grad), op=dist.ReduceOp.AVG, group=group)
