"""Programs whose model is divided among ranks: FSDP2, HSDP, tensor parallelism without replicas."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from evaluation.jobs.entry import Entry
from evaluation.jobs.job import Job
from evaluation.jobs.models import GPT, next_token_loss, text
from torchscout.config import Parallelism


def fsdp2(job: Job) -> None:
    """One copy of every shard."""
    _sharded(job, (job.world,), ("dp_shard",))


def fsdp2_compiled(job: Job) -> None:
    """Compiled as a whole, after sharding."""
    _sharded(job, (job.world,), ("dp_shard",), compiles="model")


def fsdp2_compiled_blocks(job: Job) -> None:
    """Each block compiled in place and then sharded, as TorchTitan does it."""
    _sharded(job, (job.world,), ("dp_shard",), compiles="blocks")


def hsdp(job: Job) -> None:
    """Three replicas of two shards."""
    _sharded(job, (job.world // 2, 2), ("dp_replicate", "dp_shard"))


def _sharded(job: Job, shape: tuple[int, ...], names: tuple[str, ...], compiles: str = "") -> None:
    mesh = init_device_mesh(job.device, shape, mesh_dim_names=names)
    model: nn.Module = GPT()
    backend = "aot_eager" if job.device == "cpu" else "inductor"
    for block in model.blocks:
        if compiles == "blocks":
            block.compile(backend=backend)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if compiles == "model":
        model = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.attach(model, optimizer)
    _train(job, model, optimizer, job.rank)


def tensor_parallel(job: Job) -> None:
    """All ranks hold one replica, and see the same data."""
    mesh = init_device_mesh(job.device, (job.world,), mesh_dim_names=("tp",))
    model = GPT(dropout=0.0)
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # Of plain tensors and DTensors: the multi-tensor form, the default on CUDA, takes either.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    job.attach(
        model,
        optimizer,
        parallelism=Parallelism(tensor=job.world),
        weight=lambda: model.blocks[0].up.weight,
    )
    _train(job, model, optimizer, 0)


def _train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, row: int) -> None:
    for step in job.steps():
        tokens, targets = text(step, row)
        optimizer.zero_grad()
        next_token_loss(model(tokens), targets).backward()
        optimizer.step()


_NO_HOOK = "not tried: compiled code cannot hold the hook"
JOBS: dict[str, Entry] = {
    "fsdp2": Entry(fsdp2, flip="reported"),
    "fsdp2-compiled": Entry(fsdp2_compiled, flip="reported", patience=3, not_slowed=_NO_HOOK),
    "fsdp2-compiled-blocks": Entry(fsdp2_compiled_blocks, flip="reported", patience=3, not_slowed=_NO_HOOK),
    "hsdp": Entry(hsdp, ranks=6),
    "tensor-parallel": Entry(
        tensor_parallel, ranks=2, flip="reported", not_slowed="no other rank does the same work"
    ),
}
