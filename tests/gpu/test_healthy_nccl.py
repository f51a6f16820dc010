"""Healthy jobs over NCCL, of what people combine: no incident, certified to the last check, and bitwise
themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.nccl_ranks import UNEVEN
from tests.support.ranks import run_ranks
from torchscout.attach import enable_resiliency
from torchscout.config import ObserverConfig, ReplayConfig

WIDTH, HEADS, TOKENS, WORDS, LAYERS = 256, 4, 128, 512, 4
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


pytestmark = pytest.mark.gpu
INTERVAL = 5
REPLAY = replace(UNEVEN, interval=INTERVAL)


@dataclass(frozen=True)
class Variant:
    """The combination of features that a job has."""

    wrapper: str = "ddp"
    """``ddp``, ``fsdp2``, or ``hsdp`` of two replicas."""
    attention: str = "flash"
    dropout: float = 0.1
    recompute: bool = False
    """Activation checkpointing."""
    batch_norm: bool = False
    atomics: bool = False
    """A Triton kernel that adds up a gradient with atomics, in whatever order."""
    compiled: bool = False
    """Every layer by itself."""


class Block(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        self.n1 = nn.LayerNorm(WIDTH)
        self.n2 = nn.BatchNorm1d(WIDTH) if variant.batch_norm else nn.LayerNorm(WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.shift: nn.Module = nn.Identity()
        if variant.atomics:
            from tests.support.atomic_sum import AtomicBias  # with it comes Triton

            self.shift = AtomicBias(WIDTH)
        self.drop = nn.Dropout(variant.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.variant.recompute and self.training:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        parts = self.qkv(self.n1(x)).view(rows, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(ATTENTION[self.variant.attention]):
            mixed = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.drop(self.mix(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH)))
        y = self.n2(x.flatten(0, 1)).view_as(x)
        return x + self.drop(self.shift(self.down(nn.functional.gelu(self.up(y)))))


class Gpt(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(variant) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def parallel(variant: Variant) -> nn.Module:
    """Return the model on this rank's device, wrapped."""
    model = Gpt(variant).cuda()
    if variant.compiled:
        for layer in model.layers:
            layer.compile()
    if variant.wrapper == "ddp":
        return DistributedDataParallel(model)
    world = dist.get_world_size()
    if variant.wrapper == "hsdp":
        mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replica", "shard"))
    else:
        mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(WORDS, (4, TOKENS + 1), generator=generator).cuda()


VARIANTS = {
    "ddp, flash, dropout": Variant(),
    "ddp, cudnn, activation checkpointing": Variant(attention="cudnn", recompute=True),
    "ddp, memory-efficient, batch norm": Variant(attention="efficient", batch_norm=True),
    "ddp, triton with atomics": Variant(atomics=True),
    "ddp, compiled layers": Variant(compiled=True, dropout=0.0),
    "fsdp2, flash, activation checkpointing": Variant("fsdp2", recompute=True),
    "hsdp, cudnn": Variant("hsdp", attention="cudnn"),
}
RANKS = {name: 4 if variant.wrapper == "hsdp" else 3 for name, variant in VARIANTS.items()}


@dataclass(frozen=True)
class Result:
    bits: bytes
    incidents: list[str]
    status: dict[str, Any]
    certified: int | None


def train(rank: int, run_dir: Path | None, variant: Variant, steps: int) -> Result:
    torch.manual_seed(0)
    model = parallel(variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(rank)
    session = run_dir and enable_resiliency(
        model,
        optimizer,
        replay=REPLAY,
        observer=ObserverConfig(),
        run_dir=run_dir,
    )
    for step in range(steps):
        tokens = batch(step, rank)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=variant.wrapper == "ddp"):
            logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            loss.item()
    status, certified, incidents = {}, None, []
    if session:
        status, certified = session.status(), session.certified_step
        session.close()
        incidents = [each.sentence for each in session.incidents]
    return Result(_bits(model, optimizer), incidents, status, certified)


def _bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    tensors = [*model.parameters(), *model.buffers(), *slots]
    local = [getattr(each, "_local_tensor", each.detach()) for each in tensors]
    state = [*local, torch.get_rng_state(), torch.cuda.get_rng_state()]
    return b"".join(tensor.cpu().numpy().tobytes() for tensor in state)


@pytest.mark.slow
@pytest.mark.nccl(4)
@pytest.mark.parametrize("name", VARIANTS)
def test_two_thousand_steps_are_silent_and_certified(name: str, tmp_path: Path):
    results = run_ranks(train, RANKS[name], tmp_path, VARIANTS[name], 2000, timeout=400, backend="nccl")
    for each in results:
        assert each.incidents == []
        assert each.status["failures"] == []
        assert each.status["replay"]["checks"] == 2000 // INTERVAL
        assert each.certified == 2000, each.status["replay"]


def with_and_without(rank: int, run_dir: Path, variant: Variant) -> tuple[bool, bool, Result]:
    # Strict, PyTorch refuses cuDNN's attention, whose backward does not repeat.
    torch.use_deterministic_algorithms(variant.attention != "cudnn")
    torch.utils.deterministic.fill_uninitialized_memory = False
    alone, again = (train(rank, None, variant, 20) for _ in range(2))
    attached = train(rank, run_dir, variant, 20)
    return alone.bits == again.bits, alone.bits == attached.bits, attached


@pytest.mark.nccl(4)
@pytest.mark.parametrize("name", VARIANTS)
def test_training_is_bitwise_the_same_wherever_it_repeats_itself(name: str, tmp_path: Path):
    results = run_ranks(with_and_without, RANKS[name], tmp_path, VARIANTS[name], timeout=200, backend="nccl")
    for repeats, same, attached in results:
        assert attached.incidents == []
        assert attached.status["failures"] == []
        assert same or not repeats
        assert repeats or VARIANTS[name].atomics or VARIANTS[name].attention == "cudnn"


def around_a_session(rank: int, run_dir: Path) -> list[tuple[int, int]]:
    """Bytes in use, by PyTorch and on the device, before and after each of two sessions."""
    seen = []
    model = parallel(Variant())
    optimizer = torch.optim.AdamW(model.parameters())
    for session_number in range(3):
        session = session_number and enable_resiliency(
            model, optimizer, replay=ReplayConfig(interval=1), run_dir=run_dir / str(session_number)
        )
        for step in range(6):
            tokens = batch(step, rank)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if session:
            session.close()
            assert session.failures == []
        del logits
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.distributed.barrier()
        free, total = torch.cuda.mem_get_info()
        seen.append((torch.cuda.memory_allocated(), total - free))
        torch.distributed.barrier()
    return seen


@pytest.mark.nccl(3)
def test_memory_and_communicators_are_given_back_when_a_session_is_closed(tmp_path: Path):
    for before, first, second in run_ranks(around_a_session, 3, tmp_path, timeout=200, backend="nccl"):
        assert first[0] - before[0] <= 1 << 20, "PyTorch's memory, but for scratch of signatures"
        # All ranks share the device here. One communicator takes about 200 MiB of it on each rank.
        assert first[1] - before[1] < 3 * (100 << 20), "the device's memory"
        assert second[0] - first[0] <= 4096
        assert second[1] - first[1] < 3 * (32 << 20)
