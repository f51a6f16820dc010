"""A small deterministic Transformer and its training in every layout, for the demo and the campaign.

Ordinary PyTorch: nothing here knows of torchscout.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  as everybody writes it
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "SMALL",
    "TINY",
    "Size",
    "Training",
    "Transformer",
    "average_gradients",
    "counting_batch",
    "digest",
]


class Size(NamedTuple):
    """Sizes of a model and of the batches it is trained on."""

    vocabulary: int
    length: int
    width: int
    heads: int
    layers: int
    rows: int


SMALL = Size(64, 32, 64, 4, 4, rows=8)
TINY = Size(24, 8, 16, 2, 3, rows=4)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._head = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(projected: torch.Tensor) -> torch.Tensor:  # this rank's heads only
            return projected.view(*projected.shape[:2], -1, self._head).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x)), is_causal=True
        )
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class Transformer(nn.Module):
    def __init__(self, size: Size = TINY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layer = nn.ModuleList(Layer(size.width, size.heads) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layer:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Training:
    """One rank's model and optimizer, and how to take a step.

    ``ddp=False`` averages the gradients of replicas by hand. DDP reduces in another order after its first
    step, so that a job that resumes from a checkpoint would not end with the same bits.
    """

    def __init__(
        self,
        size: Size,
        *,
        replica: int,
        shard: int = 1,
        tensor: int = 1,
        seed: int = 0,
        device: torch.device | None = None,
        ddp: bool = True,
    ) -> None:
        warnings.filterwarnings("ignore", module="torch")  # a small job cannot do anything about them
        torch.manual_seed(seed)
        self.device = device or torch.device("cpu")
        self.net = Transformer(size).to(self.device)
        self.parallelism: DeviceMesh | None = None
        self._size, self._seed, self._reader = size, seed, dist.get_rank() // tensor
        self._averages = tensor > 1 or not (ddp or shard > 1)
        self.model = self._parallelize(replica, shard, tensor)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)

    def step(self, number: int, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Train step ``number`` on this data-parallel rank's own batch; return this rank's loss."""
        batch = self.batch(number) if tokens is None else tokens
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self._averages and self.parallelism is not None:
            average_gradients(self.net.parameters(), self.parallelism["replica"].get_group())
        self.optimizer.step()
        return loss.detach()

    def batch(self, number: int) -> torch.Tensor:
        """Inputs and targets of a step, in one tensor that is one token longer than either."""
        size, seed = self._size, 100_000 * self._seed + 100 * number + self._reader
        return counting_batch(seed, size.rows, size.length, size.vocabulary).to(self.device)

    def batches(self) -> Iterator[torch.Tensor]:
        """The batches of step 1, 2, 3, ... without end."""
        return map(self.batch, itertools.count(1))

    def state(self) -> list[torch.Tensor]:
        """This rank's part of parameters and optimizer state."""
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        return [_local(each) for each in [*self.net.parameters(), *slots]]

    def digest(self) -> str:
        """A digest of everything that training leaves behind on this rank, RNG state included."""
        random = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return digest([*self.state(), torch.get_rng_state(), *random])

    def _parallelize(self, replica: int, shard: int, tensor: int) -> nn.Module:
        kind = self.device.type
        if self._averages:
            self.parallelism = init_device_mesh(kind, (replica, tensor), mesh_dim_names=("replica", "tensor"))
            columns, rows = ColwiseParallel(), RowwiseParallel()
            plan = {f"attention.{name}": columns for name in ("query", "key", "value")}
            plan |= {"attention.out": rows, "up": columns, "down": rows}  # type: ignore[dict-item]
            for layer in self.net.layer:
                parallelize_module(layer, self.parallelism["tensor"], plan)  # type: ignore[arg-type]
        elif shard > 1:
            degrees = {"replica": replica, "shard": shard} if replica > 1 else {"shard": shard}
            mesh = init_device_mesh(kind, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
            for part in [*self.net.layer, self.net]:
                fully_shard(part, mesh=mesh)
        else:
            return DistributedDataParallel(self.net)
        return self.net


def counting_batch(seed: int, rows: int, length: int, vocabulary: int) -> torch.Tensor:
    """Counting sequences of ``length + 1`` tokens with a random start and stride."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(vocabulary, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    return (start + stride * torch.arange(length + 1)) % vocabulary


def average_gradients(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Data parallelism by hand: one all-reduce over all gradients of this rank."""
    gradients = [_local(each.grad) for each in parameters if each.grad is not None]
    flat = torch.cat([each.flatten() for each in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)
    for each, averaged in zip(
        gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True
    ):
        each.copy_(averaged.view_as(each))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of the bits of all of ``tensors``."""
    whole = hashlib.blake2b(digest_size=16)
    for each in tensors:
        whole.update(each.detach().cpu().numpy().tobytes())
    return whole.hexdigest()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain
