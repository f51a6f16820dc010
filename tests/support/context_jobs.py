"""Small context-parallel jobs, each trained with a check at every step: attention by hand, and PyTorch's own.

PyTorch's ring attention knows the kernels of accelerators; here it is taught the one of the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
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
from torch.nn.functional import cross_entropy, gelu

from tests.support.replay_jobs import EVERY_STEP
from tests.support.replay_results import Result, bits_of, result_of
from tests.support.replayed_job import VOCABULARY, WIDTH, batch
from tests.support.tensor_jobs import Echo
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan

HEADS, LENGTH = 2, 8


class Product(nn.Module):
    """Attention between this rank's queries and all keys and values."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Gathered(nn.Module):
    """Keys and values of all ranks are gathered."""

    def __init__(self, context: DeviceMesh) -> None:
        super().__init__()
        self._group, self._place = context.get_group(), context.get_local_rank()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (all_gather_tensor_autograd(each.contiguous(), 2, self._group) for each in (k, v))
        own = torch.arange(q.shape[2]) + self._place * q.shape[2]
        mask = own[:, None] >= torch.arange(k.shape[2])[None, :]
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Ulysses(nn.Module):
    """Tokens are exchanged for heads and back."""

    def __init__(self, context: DeviceMesh) -> None:
        super().__init__()
        self._group = context.get_group()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (_Exchange.apply(each, self._group, 1, 2) for each in (q, k, v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
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


class Block(nn.Module):
    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.product = product
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(self.norm(x) + positions).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        attended = self.product(*mixed.chunk(3, 1)).transpose(1, 2).flatten(2)
        return x + self.down(self.dropout(gelu(attended)))


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.stack = nn.ModuleList(Block(make()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("positions", torch.randn(1, LENGTH, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.stack:
            x = block(x, self.positions)
        return self.head(x)


BY_HAND = {"gathered": Gathered, "ulysses": Ulysses}
WAYS = (*BY_HAND, "block", "module")
"""``block`` is PyTorch's ``context_parallel`` around the passes, ``module`` its style for single modules."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to train."""

    shape: tuple[int, int]
    """Replicas, or shards, and context-parallel ranks."""
    way: str
    rotation: str = "allgather"
    """How keys and values go around, where PyTorch does it."""
    sharded: bool = False
    """Whether FSDP2 shards over all ranks."""
    inside: bool = False
    """Whether the optimizer steps in the ``context_parallel`` block, too."""
    own_buffer: bool = False
    """Whether each block keeps the positions itself."""
    steps: int = 12
    rate: float = 1e-3
    """What the optimizer learns."""

    def __str__(self) -> str:
        traits = {
            "all to all": self.rotation == "alltoall",
            "under fsdp": self.sharded,
            "update inside": self.inside,
            "own buffer": self.own_buffer,
        }
        return " ".join(
            [f"{self.shape[0]}x{self.shape[1]}", self.way, *(each for each in traits if traits[each])]
        )

    @property
    def axes(self) -> tuple[str, str]:
        return ("dp_shard" if self.sharded else "dp", "cp")

    @property
    def ranks(self) -> int:
        return self.shape[0] * self.shape[1]


def train(rank: int, trial: Trial, run_dir: Path | None, faults: FaultPlan = FaultPlan()) -> Result:  # noqa: B008
    """Train; without ``run_dir``, without torchscout."""
    warnings.filterwarnings("ignore", message=".*(view tensor|is deprecated).*")
    torch.manual_seed(0)
    axes = init_device_mesh("cpu", trial.shape, mesh_dim_names=trial.axes)
    net = _net(trial, axes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=trial.rate)
    echo = None if trial.sharded else Echo(net.stack[0])
    with Injector(faults, rank, net, optimizer) as injector:
        session = run_dir and enable_resiliency(
            net,
            optimizer,
            replay=EVERY_STEP,
            observer=None,
            parallelism=_parallelism(trial, axes),
            run_dir=run_dir,
        )
        positions = [each for name, each in net.named_buffers() if name.endswith("positions")]
        for step in range(1, trial.steps + 1):
            tokens, targets = batch(step, rank // trial.shape[1], length=LENGTH)
            with _shared(trial, axes["cp"], [tokens, targets], positions):
                _differentiate(net, tokens, targets)
                if not trial.sharded:
                    for parameter in net.parameters():
                        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
                if trial.inside:
                    optimizer.step()
            if not trial.inside:
                optimizer.step()
    found = result_of(bits_of(net, optimizer), session or None, len(injector.fired))
    return replace(found, echoes=echo and echo.outcomes)


def _net(trial: Trial, axes: DeviceMesh) -> Net:
    net = Net(lambda: BY_HAND[trial.way](axes["cp"]) if trial.way in BY_HAND else Product())
    if trial.own_buffer:
        _keep_positions(net)
    if trial.way not in BY_HAND:
        _teach_the_cpu_kernel()
        ring.set_rotate_method(trial.rotation)
    if trial.way == "module":
        style = ring._ContextParallel(seq_dim=2, attention_type=ring._ContextParallel.AttentionType.SDPA)
        for block in net.stack:
            parallelize_module(block.product, axes["cp"], style)
        ring._enable_context_parallel_dispatcher()
    if trial.sharded:
        everybody = axes[trial.axes]._flatten("dp_shard_cp")
        for block in net.stack:
            fully_shard(block, mesh=everybody)
        fully_shard(net, mesh=everybody)
    return net


def _parallelism(trial: Trial, axes: DeviceMesh) -> DeviceMesh | Parallelism | None:
    """Return how parallelism is passed to torchscout; FSDP's parameters show it by themselves."""
    if trial.sharded:
        return None
    return axes if trial.way == "block" else Parallelism(replica=trial.shape[0], context=trial.shape[1])


def _differentiate(net: Net, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    net.zero_grad()
    cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()


@contextmanager
def _shared(
    trial: Trial, context: DeviceMesh, given: list[torch.Tensor], kept: list[torch.Tensor]
) -> Iterator[None]:
    """Shard every tensor along the sequence inside the block."""
    tensors = [*given, *kept]
    if trial.way == "block":
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


def _keep_positions(net: Net) -> None:
    """Give each block its own copy of the positions."""
    for block in net.stack:
        block.register_buffer("positions", net.positions.clone())
        block.register_forward_pre_hook(lambda self, args: (args[0], self.positions))


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
