"""What campaign jobs train: a small deterministic Transformer of three blocks, in each layout (paper).

Ordinary PyTorch, and nothing in it knows of torchscout.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  as everybody writes it
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchscout.campaign.cell import BLOCKS, JobLayout

__all__ = ["Training", "Transformer", "device_of"]

VOCABULARY, LENGTH, WIDTH, HEADS = 24, 8, 16, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        query, key, value = (each.transpose(1, 2) for each in split.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Training:
    """One rank's model and optimizer, and how to take a step."""

    def __init__(self, layout: JobLayout, seed: int = 0) -> None:
        warnings.filterwarnings("ignore", module="torch")  # of nothing that a small job could do about
        torch.manual_seed(seed)
        self.device = device_of(layout)
        self.net = Transformer().to(self.device)
        self._reader, self._seed = dist.get_rank() // layout.tensor, seed
        self._replicas: DeviceMesh | None = None
        """Over which gradients are averaged by hand."""
        self.model = self._parallel(layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)

    def step(self, number: int, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """The step of this number, for which each data-parallel rank has its own batch; this rank's loss."""
        batch = self.batch(number) if tokens is None else tokens
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._average()
        self.optimizer.step()
        return loss.detach()

    def batch(self, number: int) -> torch.Tensor:
        """Counting sequences with a random start and stride."""
        generator = torch.Generator().manual_seed(100_000 * self._seed + 100 * number + self._reader)
        start = torch.randint(VOCABULARY, (4, 1), generator=generator)
        stride = torch.randint(1, 4, (4, 1), generator=generator)
        return ((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY).to(self.device)

    def batches(self) -> Iterator[torch.Tensor]:
        """One for each step, without end."""
        return map(self.batch, itertools.count(1))

    def state(self) -> list[torch.Tensor]:
        """What this rank holds of parameters and optimizer slots."""
        slots = [slot for slots in self.optimizer.state.values() for slot in slots.values()]
        return [_local(each) for each in [*self.net.parameters(), *slots]]

    def digest(self) -> str:
        """Of all that training leaves behind on this rank, random numbers to come included."""
        whole = hashlib.blake2b(digest_size=16)
        random = [torch.get_rng_state()]
        if self.device.type == "cuda":
            random.append(torch.cuda.get_rng_state(self.device))
        for each in [*self.state(), *random]:
            whole.update(each.cpu().numpy().tobytes())
        return whole.hexdigest()

    def _parallel(self, layout: JobLayout) -> nn.Module:
        if layout.tensor > 1:
            names: tuple[str, ...] = ("replica", "tensor")
            degrees = (layout.replica, layout.tensor)
            axes = init_device_mesh(layout.device, degrees, mesh_dim_names=names)
            for block in self.net.blocks:
                parallelize_module(
                    block, axes["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
                )
            self._replicas = axes["replica"]
            return self.net
        if layout.shard > 1:
            shape = tuple(degree for degree in (layout.replica, layout.shard) if degree > 1)
            names = ("replica", "shard")[-len(shape) :]
            axes = init_device_mesh(layout.device, shape, mesh_dim_names=names)
            for part in [*self.net.blocks, self.net]:
                fully_shard(part, mesh=axes)
            return self.net
        return DistributedDataParallel(self.net)

    def _average(self) -> None:
        """Data parallelism by hand, where no wrapper does it: one all-reduce over all gradients."""
        if self._replicas is None:
            return
        local = [_local(each) for each in _gradients(self.net.parameters())]
        flat = torch.cat([each.flatten() for each in local])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self._replicas.get_group())
        for each, averaged in zip(local, torch.split(flat, [each.numel() for each in local]), strict=True):
            each.copy_(averaged.view_as(each))


def device_of(layout: JobLayout) -> torch.device:
    """Where this rank computes. On CUDA it becomes the current device; several ranks may share one."""
    if layout.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _gradients(parameters: Iterator[nn.Parameter]) -> Sequence[torch.Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain
