"""Programs whose model is divided among ranks: FSDP2, HSDP, tensor parallelism without replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from evaluation.jobs.entry import Entry, Wrong
from evaluation.jobs.job import Job
from evaluation.jobs.models import GPT, LAYERS, OWNED, REPLICATED, train_on_text
from torchscout.config import Parallelism


def plain(net: GPT, **options: Any) -> None:
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)


def units(net: GPT, **options: Any) -> None:
    """Units inside of units, a unit of two modules; the first block's passes begin by gathering the second
    one's parameters."""
    for block in net.blocks:
        fully_shard(block.up, **options)
    fully_shard([net.norm, net.head], **options)
    plain(net, **options)
    first, second = net.blocks
    first.set_modules_to_forward_prefetch([second])
    first.set_modules_to_backward_prefetch([second])


def in_bfloat16(net: GPT, **options: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain(net, mp_policy=policy, **options)


def recomputing(net: GPT, **options: Any) -> None:
    for place, block in enumerate(net.blocks):
        net.blocks[place] = checkpoint_wrapper(block)
    plain(net, **options)


def compiled_blocks(net: GPT, **options: Any) -> None:
    """Each block compiled in place and then sharded, as TorchTitan does it."""
    for block in net.blocks:
        block.compile(backend=_compiler())
    plain(net, **options)


def fsdp2(job: Job, shard: Callable[..., None] = plain, *, is_compiled: bool = False) -> None:
    """One copy of every shard. ``is_compiled``: as a whole, after sharding."""
    mesh = init_device_mesh(job.device, (job.world,), mesh_dim_names=("dp_shard",))
    _sharded(job, shard, mesh, is_compiled)


def hsdp(job: Job) -> None:
    """Replicas of two shards."""
    names = ("dp_replicate", "dp_shard")
    _sharded(job, plain, init_device_mesh(job.device, (job.world // 2, 2), mesh_dim_names=names))


def _sharded(job: Job, shard: Callable[..., None], mesh: DeviceMesh, is_compiled: bool = False) -> None:
    net = GPT()
    shard(net, mesh=mesh)
    model = torch.compile(net, backend=_compiler()) if is_compiled else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.attach(model, optimizer)
    train_on_text(job, model, optimizer, job.rank)


def _compiler() -> str:
    return "inductor" if dist.get_backend() == "nccl" else "aot_eager"


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
    train_on_text(job, model, optimizer, 0)


_REDUCED = (
    *(f"{layer}/shards" for layer in LAYERS),
    *(f"blocks.{block}/{what}" for block in (0, 1) for what in ("grad_scattered", "grad_reduced")),
)
_NO_HOOK = "not tried: compiled code cannot hold the hook"
_OF_SHARDS = {
    "output": Wrong("blocks.1/output", 2),
    "gradient": Wrong("blocks.1/grad_input", 2),
    # And the gradients of the norm's weights.
    "inside": Wrong("blocks.1.norm2/grad_output", 0, surface="blocks.1/grad_input"),
    "head": Wrong("head/output", 0),
    # The owner's real update, when its turn has come.
    "update": Wrong("positions/weight", 1, surface="optimizer/update", calls=range(1)),
    # Training gathers five times in a step, replay once with scratch data and for each embedding; then comes
    # the layer.
    "gathered": Wrong("all_gather@default_pg", 2, surface="blocks.1/parameters", calls=range(8, 400)),
}
_OF_REPLICAS = {
    "output": Wrong("blocks.1/output", 3),
    "weight": Wrong("blocks.1.up/weight", 3, calls=range(1)),
    "average": Wrong("blocks.1.up/weight.exp_avg", 3, calls=range(1)),
    "gradient": Wrong("blocks.1.up/weight.grad", 3, surface="blocks.1.up/weight", calls=range(1)),
    "gathered": Wrong("all_gather@mesh_dp_shard", 3, surface="blocks.1/parameters", calls=range(8, 400)),
    # Training reduces three times in a step: two blocks and the rest; replay reduces once more.
    "reduced": Wrong("all_reduce@mesh_dp_replicate", 3, surface="blocks.1/grad_reduced", calls=range(3, 400)),
}
# Of two copies of a shard nobody can say which is right. Gathered, parameters are equal on all ranks.
_OF_PAIRS = {
    "output": Wrong("blocks.1/output", 3),
    "gradient": Wrong("blocks.1/grad_input", 3),
    "weight": Wrong("blocks.1.up/weight", 3, calls=range(1), scope="peer_group", named=(1, 3)),
}
_ON_CUDA = ("healthy", "slow_then_flipped")

JOBS: dict[str, Entry] = {
    "fsdp2": Entry(
        fsdp2,
        compared=OWNED,
        unchecked=(),
        wrong=_OF_SHARDS,
        in_test=("healthy", "wrong_number:output"),
        in_ci=("slow_then_flipped", "resumed", "wrong_number:update", "wrong_number:gathered"),
        on_cuda=_ON_CUDA,
    ),
    "fsdp2-units": Entry(
        partial(fsdp2, shard=units),
        compared=OWNED,
        unchecked=(),
        wrong={"output": _OF_SHARDS["output"]},
    ),
    "fsdp2-bfloat16": Entry(
        partial(fsdp2, shard=in_bfloat16),
        compared=OWNED,
        unchecked=(),
        wrong={"output": replace(_OF_SHARDS["output"], bit=5)},
        patience=3,
        on_cuda=_ON_CUDA,
    ),
    "fsdp2-checkpointing": Entry(
        partial(fsdp2, shard=recomputing),
        compared=OWNED,
        unchecked=(),
        wrong={"output": _OF_SHARDS["output"]},
    ),
    "fsdp2-compiled": Entry(
        partial(fsdp2, is_compiled=True),
        compared=OWNED,
        unchecked=(),
        wrong={"output": replace(_OF_SHARDS["output"], calls=None)},
        patience=3,
        not_slowed=_NO_HOOK,
        in_ci=("healthy",),
    ),
    "fsdp2-compiled-blocks": Entry(
        partial(fsdp2, shard=compiled_blocks),
        compared=OWNED,
        unchecked=(),
        patience=3,
        not_slowed=_NO_HOOK,
    ),
    "hsdp": Entry(
        hsdp,
        ranks=6,
        compared=(*REPLICATED, *_REDUCED),
        unchecked=(),
        wrong=_OF_REPLICAS,
        in_ci=("wrong_number:weight", "wrong_number:reduced"),
        on_cuda=_ON_CUDA,
    ),
    "hsdp-two-replicas": Entry(
        hsdp,
        ranks=4,
        flip="reported",
        # Layers are compared among all four ranks, which hold different shards.
        compared=REPLICATED,
        unchecked=(),
        wrong=_OF_PAIRS,
        in_ci=("wrong_number:output", "wrong_number:weight"),
    ),
    "tensor-parallel": Entry(
        tensor_parallel,
        ranks=2,
        flip="reported",
        has_no_peers=True,
        not_slowed="no other rank does the same work",
        on_cuda=_ON_CUDA,
    ),
}
