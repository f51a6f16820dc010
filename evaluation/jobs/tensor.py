"""Programs whose layers are divided among ranks: tensor and sequence parallelism, alone or with replicas,
FSDP2 or HSDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

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

from evaluation.jobs.entry import Entry, Wrong
from evaluation.jobs.job import Job, local_of
from evaluation.jobs.models import GPT, OWNED, REPLICATED, next_token_loss, text

SLICES = 2
"""Ranks that divide each layer."""
AXES = {2: ("dp", "tp"), 3: ("dp_replicate", "dp_shard", "tp")}


def plain(net: GPT, tensor: DeviceMesh) -> None:
    """Layers are split; what goes from block to block is whole on every rank."""
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, tensor, ends)
    for block in net.blocks:
        layers = {
            "attention.qkv": ColwiseParallel(),
            "attention.proj": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, tensor, layers)


def sequence(net: GPT, tensor: DeviceMesh) -> None:
    """From block to block each rank has its tokens only, as a plain tensor."""
    split = partial(RowwiseParallel, input_layouts=Replicate())
    ends = {
        "tokens": split(output_layouts=Shard(1)),
        "positions": split(output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, tensor, ends)
    for block in net.blocks:
        layers = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention.qkv": ColwiseParallel(input_layouts=Shard(1)),
            "attention.proj": RowwiseParallel(output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, tensor, layers)


def distributed(net: GPT, tensor: DeviceMesh) -> None:
    """As ``sequence``, and what goes from block to block, within, and to the loss is a DTensor."""
    split = partial(RowwiseParallel, input_layouts=Replicate(), use_local_output=False)
    ends = {
        "tokens": split(output_layouts=Shard(1)),
        "positions": split(output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(net, tensor, ends)
    for block in net.blocks:
        layers = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention.qkv": ColwiseParallel(input_layouts=Shard(1)),
            "attention.proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
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


def train(
    job: Job, split: Callable[[GPT, DeviceMesh], None], shape: tuple[int, ...], *, sharded: bool = False
) -> None:
    """The last axis of the mesh divides layers; along the others are replicas, or FSDP's shards."""
    axes = init_device_mesh(job.device, shape, mesh_dim_names=AXES[len(shape)])
    net = GPT()
    split(net, axes["tp"])
    data = axes[axes.mesh_dim_names[:-1]]
    if sharded:
        for block in net.blocks:
            fully_shard(block, mesh=data)
        fully_shard(net, mesh=data)
    # Of plain tensors and DTensors: the multi-tensor form, the default on CUDA, takes either.
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    job.attach(
        net,
        optimizer,
        weight=lambda: net.blocks[0].up.weight,
        **({} if sharded else {"parallelism": axes}),
    )
    replica = job.rank // shape[-1]
    if job.first_step == 1:  # otherwise the checkpoint had the random state
        torch.manual_seed(1000 + replica)  # what is whole on each rank drops out alike
    for step in job.steps():
        optimizer.zero_grad()
        tokens, targets = text(step, replica)
        with loss_parallel() if split is distributed else nullcontext():
            next_token_loss(net(tokens), targets).backward()
        if not sharded:
            average(net, data.get_group())
        optimizer.step()


def average(net: nn.Module, replicas: dist.ProcessGroup | None = None) -> None:
    """Average gradients over the replicas, by hand."""
    for parameter in net.parameters():
        if parameter.grad is not None:
            dist.all_reduce(local_of(parameter.grad), op=dist.ReduceOp.AVG, group=replicas)


_PAIRS = (3, SLICES)
_WRONG = {
    "output": Wrong("blocks.1/output", 3),
    "weight": Wrong("blocks.1.up/weight", 3, calls=range(1)),
    "part": Wrong("blocks.1.up/output", 3, "blocks.1/output", bit=30, scope="machine", named=(2, 3)),
}
JOBS: dict[str, Entry] = {
    "tensor-plain": Entry(
        partial(train, split=plain, shape=_PAIRS),
        ranks=6,
        compared=REPLICATED,
        unchecked=(),
        wrong=_WRONG,
        in_ci=("healthy", "wrong_number:part"),
    ),
    "tensor-sequence": Entry(
        partial(train, split=sequence, shape=_PAIRS),
        ranks=6,
        compared=REPLICATED,
        unchecked=(),
        wrong={
            "grad_input": Wrong("blocks.1/grad_input", 3),
            "gradient": Wrong("blocks.1.up/weight.gradient", 3, "blocks.1.up/weight.grad"),
            "norm-gradient": Wrong("blocks.1.norm2/weight.gradient", 3, "blocks.1.norm2/weight.grad"),
            "slot": Wrong("blocks.1.down/weight.exp_avg", 3, calls=range(1)),
        },
    ),
    "tensor-dtensor": Entry(
        partial(train, split=distributed, shape=_PAIRS),
        ranks=6,
        compared=REPLICATED,
        unchecked=(),
        wrong=_WRONG,
        in_ci=("wrong_number:weight",),
    ),
    "tensor-fsdp2": Entry(
        partial(train, split=distributed, shape=_PAIRS, sharded=True),
        ranks=6,
        flip="reported",
        compared=OWNED,
        unchecked=(),
        wrong={
            "output": Wrong("blocks.1/output", 3),
            # The owner's real update, when its turn has come; the source of that round is its owner.
            "update": Wrong("blocks.0.norm1/weight", 5, "optimizer/update", step=3, calls=range(1)),
        },
    ),
    "tensor-hsdp": Entry(
        partial(train, split=sequence, shape=(2, 2, SLICES), sharded=True),
        ranks=8,
        flip="reported",
        compared=REPLICATED,
        unchecked=(),
    ),
}
