"""The training job that is measured: a GPT, its optimizer and one step, on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from torchscout.attach import enable_resiliency
from torchscout.config import BaselineConfig, CheckpointConfig, ObserverConfig, ReplayConfig, StragglerConfig
from torchscout.session.session import Session

# Ranks that share a device delay each other, and a layer that seems slow is timed again. Ranks with a device
# each do not, so that this is left out of what a check costs.
_NEVER_SLOW = StragglerConfig(min_slowdown_ms=1e6)
_NEVER_SLOWER = BaselineConfig(min_slowdown_ms=1e6)


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model and of the batch of one rank."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    parameters: str
    """The dtype of parameters; float32 ones are computed with under bfloat16 autocast."""

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.parameters)
        return found

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        wanted = self.dtype is torch.float32 and device.type == "cuda"
        return torch.autocast("cuda", dtype=torch.bfloat16) if wanted else contextlib.nullcontext()

    @property
    def computed(self) -> torch.dtype:
        """The dtype of activations on CUDA."""
        return torch.bfloat16


MODELS = {
    "tiny": Size(4, 64, 4, 512, 2, 32, "float32"),
    "300m": Size(24, 1024, 16, 50304, 8, 1024, "bfloat16"),
    "1b": Size(24, 2048, 16, 50304, 4, 1024, "float32"),
}


class Block(nn.Module):
    """A Transformer layer: causal attention, an MLP four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return out


class Gpt(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


@dataclass(slots=True)
class Window:
    """Steps that followed one another without a synchronization in between; milliseconds."""

    host: list[float]
    device: list[float]
    """Between events at the ends of steps; the host's where there is no device."""
    peak: int
    """Bytes that the allocator had given out at most."""

    @property
    def total(self) -> float:
        return sum(self.device)


class Job:
    """One rank's model, optimizer and batch."""

    def __init__(self, rank: int, size: Size, device: str, parallel: str, run_dir: Path) -> None:
        torch.manual_seed(0)
        self.rank, self.size, self.parallel, self._run_dir = rank, size, parallel, run_dir
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        model: nn.Module = Gpt(size).to(self.device, size.dtype)
        self.model = _wrapped(model, parallel, self.is_cuda)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1), generator=generator)
        self._inputs, self._targets = tokens[:, :-1].to(self.device), tokens[:, 1:].to(self.device).flatten()
        self._sessions = 0

    def step(self) -> None:
        with self.size.autocast(self.device):
            logits = self.model(self._inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1), self._targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def window(self, count: int) -> Window:
        """``count`` steps, all ranks at once; the device is waited for before and after, not in between."""
        self.synchronize()
        dist.barrier()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        marks = [self._mark()]
        for _ in range(count):
            self.step()
            marks.append(self._mark())
        self.synchronize()
        host = [1e3 * (end[0] - begin[0]) for begin, end in itertools.pairwise(marks)]
        device = host
        if self.is_cuda:
            device = [begin[1].elapsed_time(end[1]) for begin, end in itertools.pairwise(marks)]
        peak = torch.cuda.max_memory_allocated() if self.is_cuda else 0
        return Window(host, device, peak)

    @contextmanager
    def attached(
        self,
        replay: ReplayConfig | None,
        observer: ObserverConfig | None,
        checkpoint: CheckpointConfig | None = None,
    ) -> Iterator[Session]:
        self._sessions += 1
        if replay is not None:
            replay = dataclasses.replace(replay, straggler=_NEVER_SLOW, baseline=_NEVER_SLOWER)
        session = enable_resiliency(
            self.model,
            self.optimizer,
            replay=replay,
            observer=observer,
            checkpoint=checkpoint,
            run_dir=self._run_dir / str(self._sessions),
        )
        with session:
            yield session
        if session.failures:
            raise RuntimeError(f"torchscout failed: {session.failures}")

    def folder(self, name: str) -> Path:
        """A folder of the session that is attached next."""
        return self._run_dir / f"{name}-{self._sessions + 1}"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def _mark(self) -> tuple[float, Any]:
        event = None
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return time.perf_counter(), event


def _wrapped(model: nn.Module, parallel: str, is_cuda: bool) -> nn.Module:
    if parallel == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda" if is_cuda else "cpu", (dist.get_world_size(),))
    is_mixed = is_cuda and next(model.parameters()).dtype is torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if is_mixed else MixedPrecisionPolicy()
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    for layer in [*model.layers, model]:  # type: ignore[union-attr, misc]  # a Gpt
        shard(layer)
    return model
