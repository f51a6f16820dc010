"""Healthy jobs over NCCL, of what people combine: no incident, certified to the last check, and bitwise
themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.gpu_models import Variant, batch, parallel
from tests.support.nccl_ranks import UNEVEN
from tests.support.ranks import run_ranks
from torchscout.attach import enable_resiliency
from torchscout.config import ObserverConfig, ReplayConfig

pytestmark = pytest.mark.gpu
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
INTERVAL = 5
REPLAY = replace(UNEVEN, interval=INTERVAL)


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
