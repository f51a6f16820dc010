"""Programs whose sequences are divided among ranks: attention that goes around ranks by hand, and PyTorch's.

PyTorch's ring attention knows the kernels of accelerators; on a CPU it is taught the one there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F  # noqa: N812  as everywhere

from evaluation.jobs.entry import Entry, Wrong
from evaluation.jobs.job import Job
from evaluation.jobs.models import (
    GPT,
    LENGTH,
    UPDATES,
    WIDTH,
    Block,
    Product,
    next_token_loss,
    surfaces_of,
    text,
)
from evaluation.jobs.tensor import average
from torchscout.config import Parallelism

PARTS = 2
"""Ranks that divide each sequence."""


class Gathered(nn.Module):
    """Keys and values of all ranks are gathered."""

    def __init__(self, context: DeviceMesh) -> None:
        super().__init__()
        self._group, self._place = context.get_group(), context.get_local_rank()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (all_gather_tensor_autograd(each.contiguous(), 2, self._group) for each in (k, v))
        own = torch.arange(q.shape[2]) + self._place * q.shape[2]
        mask = own[:, None] >= torch.arange(k.shape[2])[None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Ulysses(nn.Module):
    """Tokens are exchanged for heads and back."""

    def __init__(self, context: DeviceMesh) -> None:
        super().__init__()
        self._group = context.get_group()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (_Exchange.apply(each, self._group, 1, 2) for each in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return _Exchange.apply(found, self._group, 2, 1)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, give: int, get: int) -> torch.Tensor:
        ctx.how = group, get, give
        given = torch.stack(x.chunk(group.size(), give))
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given, group=group)
        return torch.cat([*got], get)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Exchange.forward(ctx, gradient.contiguous(), *ctx.how), None, None, None


class PlacedBlock(Block):
    """It is told the places of its tokens, as others are told their rotations."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return super().forward(x + places)


class Net(GPT):
    """A GPT whose positions are a buffer, which is divided with the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = None
        self.blocks = nn.ModuleList(PlacedBlock() for _ in self.blocks)
        for block in self.blocks:
            block.attention.product = Product()  # without dropout, which no ring has
        self.register_buffer("places", torch.randn(1, LENGTH, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.places)
        return self.head(self.norm(x))


BY_HAND = {"gathered": Gathered, "ulysses": Ulysses}


@dataclass(frozen=True)
class Layout:
    way: str = "block"
    """``block`` is PyTorch's ``context_parallel`` around the passes, ``module`` its style for single modules;
    the others are by hand."""
    copies: int = 3
    """Replicas, or shards."""
    rotation: str = "allgather"
    """How keys and values go around, where PyTorch does it."""
    sharded: bool = False
    """Whether FSDP2 shards over all ranks."""
    inside: bool = False
    """Whether the optimizer steps in the ``context_parallel`` block, too."""
    own_buffer: bool = False
    """Whether each block keeps the places itself."""
    watched: bool = False
    """Whether torchscout sees when a batch is fetched, which is when checkpoints are captured."""

    @property
    def axes(self) -> tuple[str, str]:
        return ("dp_shard" if self.sharded else "dp", "cp")

    def parallelism(self, axes: DeviceMesh) -> dict[str, Any]:
        """How parallelism is passed to torchscout; FSDP's parameters show it by themselves."""
        if self.sharded:
            return {}
        by_degrees = Parallelism(replica=self.copies, context=PARTS)
        return {"parallelism": axes if self.way == "block" else by_degrees}

    def surfaces(self, _: int) -> set[str]:
        state = {"state/owned"} if self.sharded else {"state/parameters", "state/optimizer"}
        return {*surfaces_of(Net()), *UPDATES, *state, "process_groups/received"}


def train(job: Job, layout: Layout) -> None:
    shape = (layout.copies, PARTS)
    axes = init_device_mesh(job.device, shape, mesh_dim_names=layout.axes)
    net = _net(layout, axes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    job.attach(net, optimizer, **layout.parallelism(axes))
    places = [each for name, each in net.named_buffers() if name.endswith("places")]
    for step in job.steps():
        batch = text(step, job.rank // PARTS)
        tokens, targets = (each.clone() for each in (job.fetched(batch) if layout.watched else batch))
        with _shared(layout, axes["cp"], [tokens, targets], places):
            optimizer.zero_grad()
            next_token_loss(net(tokens), targets).backward()
            if not layout.sharded:
                average(net)
            if layout.inside:
                optimizer.step()
        if not layout.inside:
            optimizer.step()


def _net(layout: Layout, axes: DeviceMesh) -> Net:
    net = Net()
    if layout.own_buffer:
        _keep_places(net)
    if layout.way in BY_HAND:
        for block in net.blocks:
            block.attention.product = BY_HAND[layout.way](axes["cp"])
    else:
        _teach_the_cpu_kernel()
        ring.set_rotate_method(layout.rotation)
    if layout.way == "module":
        style = ring._ContextParallel(seq_dim=2, attention_type=ring._ContextParallel.AttentionType.SDPA)
        for block in net.blocks:
            parallelize_module(block.attention.product, axes["cp"], style)
        ring._enable_context_parallel_dispatcher()
    if layout.sharded:
        everybody = axes[layout.axes]._flatten("dp_shard_cp")
        for block in net.blocks:
            fully_shard(block, mesh=everybody)
        fully_shard(net, mesh=everybody)
    return net


@contextmanager
def _shared(
    layout: Layout, context: DeviceMesh, given: list[torch.Tensor], kept: list[torch.Tensor]
) -> Iterator[None]:
    """Shard every tensor along the sequence inside the block."""
    tensors = [*given, *kept]
    if layout.way == "block":
        with context_parallel(
            context, buffers=tensors, buffer_seq_dims=[1] * len(tensors), no_restore_buffers={*given}
        ):
            yield
        return
    whole = [each.clone() for each in kept]
    for each in tensors:
        part = each.chunk(context.size(), 1)[context.get_local_rank()].clone()
        each.resize_(part.shape).copy_(part)
    yield
    for each, before in zip(kept, whole, strict=True):
        each.resize_(before.shape).copy_(before)


def _keep_places(net: Net) -> None:
    """Give each block its own copy of the places."""
    for block in net.blocks:
        block.register_buffer("places", net.places.clone())
        block.register_forward_pre_hook(lambda self, args: (args[0], self.places))


def _teach_the_cpu_kernel() -> None:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def attend(_: Any, args: Any, kwargs: Any) -> Any:
        q, k, v, dropout, causal = (*map(_local, args), *(0.0, False)[len(args) - 3 :])
        settings = {"is_causal": causal, "dropout_p": dropout, "scale": kwargs.get("scale")}
        found = ring._templated_ring_attention(
            args[0].device_mesh.get_group(), 2, kernel, query=q, key=k, value=v, **settings
        )
        return tuple(_like(args[0], each) for each in found[:2])

    def differentiate(_: Any, args: Any, kwargs: Any) -> Any:
        names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
        given = dict(zip(names, map(_local, args), strict=True))
        group = args[0].device_mesh.get_group()
        found = ring._templated_ring_attention_backward(
            group, 2, backward.default, grad_out_name="grad_out", scale=kwargs.get("scale"), **given
        )
        return tuple(_like(args[0], each) for each in found[:3])

    ring.custom_ops[kernel.default] = attend
    ring.custom_ops[backward.default] = differentiate


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)


_PARTS_OF_BUFFERS = (
    "a capture begins when the model is called: in the block, where buffers are parts, which nothing restores"
)


def entry(layout: Layout, **more: Any) -> Entry:
    return Entry(
        partial(train, layout=layout),
        ranks=layout.copies * PARTS,
        compared=layout.surfaces,
        unchecked=(),
        wrong_today={} if layout.watched else {"resumed": _PARTS_OF_BUFFERS},
        **more,
    )


OUTPUT = Wrong("blocks.1/output", 3)
JOBS: dict[str, Entry] = {
    "context-block": entry(
        Layout(),
        in_ci=("wrong_number:output", "wrong_number:key"),
        wrong={
            "output": OUTPUT,
            "grad_input": Wrong("blocks.1/grad_input", 3),
            "gradient": Wrong("blocks.1.down/weight.gradient", 3, "blocks.1.down/weight.grad"),
            "weight": Wrong("blocks.1.attention.qkv/weight", 3, calls=range(1)),
            "slot": Wrong("blocks.1.down/weight.exp_avg", 3, calls=range(1)),
            "key": Wrong(
                "blocks.1.attention.qkv/output",
                2,
                "blocks.1/output",
                bit=22,
                index=WIDTH,
                scope="machine",
                named=(2, 3),
            ),
        },
    ),
    "context-module": entry(Layout("module", watched=True), wrong={"output": OUTPUT}),
    "context-gathered": entry(Layout("gathered"), wrong={"output": OUTPUT}),
    "context-ulysses": entry(Layout("ulysses"), wrong={"output": OUTPUT}, in_ci=("healthy",)),
    "context-fsdp2": entry(Layout(copies=3, sharded=True), flip="reported"),
    "context-all-to-all": entry(Layout(rotation="alltoall", inside=True, own_buffer=True)),
}
