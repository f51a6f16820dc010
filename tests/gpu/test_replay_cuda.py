"""Replay on a CUDA device: ranks that share it find a wrong number, and training is unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.nccl_ranks import UNEVEN
from tests.support.ranks import run_ranks
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.replay.capture.invocation import Invocation
from torchscout.replay.capture.saved_calls import SavedCall

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS, STEPS = 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.drop = nn.LayerNorm(64), nn.MultiheadAttention(64, 4), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.mix(y, y, y, need_weights=False)[0]
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(rank: int, run_dir: Path | None, faults: FaultPlan) -> tuple[bytes, list, list, dict]:
    """Every bit that training leaves behind."""
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with Injector(faults, rank, model, optimizer) as injector:
        session = run_dir and enable_resiliency(
            model,
            optimizer,
            replay=replace(UNEVEN, interval=1, variants=(1.0, 10.0)),
            observer=None,
            parallelism=Parallelism(replica=RANKS),
            run_dir=run_dir,
        )
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + rank)
            tokens = torch.randint(100, (4, 17), generator=generator).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= RANKS
            optimizer.step()
    incidents, status = ([], {}) if not session else (session.incidents, session.status())
    slots = [slot for slots in optimizer.state.values() for slot in slots.values()]
    state = [*model.parameters(), *slots, torch.get_rng_state(), torch.cuda.get_rng_state()]
    bits = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in state)
    return bits, [(each.ranks, each.sentence) for each in incidents], injector.fired, status


def with_and_without(rank: int, run_dir: Path) -> tuple[bool, list, dict]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # so that two runs can be compared at all
    alone, _, _, _ = train(rank, None, FaultPlan())
    bits, incidents, _, status = train(rank, run_dir, FaultPlan())
    return alone == bits, incidents, status


def test_training_on_cuda_is_bitwise_the_same_and_silent(tmp_path: Path):
    for same, incidents, status in run_ranks(with_and_without, RANKS, tmp_path, timeout=240):
        assert same
        assert incidents == []
        assert status["failures"] == []
        assert all(last["clean"] for last in status["replay"]["last"].values())
        assert status["replay"]["last"].keys() >= {
            "layers.0",
            "layers.1",
            "embedding",
            "head",
            "process_groups",
        }
        assert status["replay"]["not_checked"] == {}


@pytest.mark.parametrize(
    ("at", "surface", "calls"),
    [
        ("layers.1.up/weight", "layers.1.up/weight", range(1)),
        ("layers.1/output", "layers.1/output", range(1, 200)),
        ("layers.1.up/weight.gradient", "layers.1.up/weight.grad", range(1, 200)),
        ("layers.1.up/weight.exp_avg_sq", "layers.1.up/weight.exp_avg_sq", range(1)),
    ],
)
def test_the_lowest_bit_on_one_rank_is_found(at: str, surface: str, calls: range, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=2, at=at, step=4, bit=0, calls=calls)
    found = run_ranks(train, RANKS, tmp_path, faults, timeout=240)
    assert found[2][2], "the fault has fired"
    ((ranks, sentence),) = found[0][1]
    assert ranks == (2,)
    assert surface in sentence


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_slow_rank_is_named_by_the_devices_clock(at: str, tmp_path: Path):
    faults = FaultPlan()
    for layer in (0, 1):
        faults = faults.delay(rank=2, at=f"layers.{layer}/{at}", step=range(3, 7), seconds=0.25, calls=None)
    found = run_ranks(train, RANKS, tmp_path, faults, timeout=240)
    assert found[2][2], "the fault has fired"
    assert {ranks for ranks, _ in found[0][1]} == {(2,)}, found[0][1]


def memory(rank: int, run_dir: Path, interval: int | None) -> list[int]:
    """Bytes that are allocated on the device after each step."""
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = None if interval is None else ReplayConfig(interval=interval)
    session = enable_resiliency(
        model,
        optimizer,
        replay=config,
        observer=None,
        parallelism=Parallelism(replica=2),
        run_dir=run_dir,
    )
    allocated = []
    for _ in range(9):
        tokens = torch.randint(100, (4, 17)).cuda()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del loss
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    session.close()
    assert session.failures == []
    return allocated


def with_and_without_checks(rank: int, run_dir: Path) -> tuple[list[int], list[int]]:
    bare = memory(rank, run_dir / "bare", None)
    torch.cuda.empty_cache()
    return bare, memory(rank, run_dir / "checked", 3)


def test_device_memory_returns_to_where_it_was(tmp_path: Path):
    for bare, checked in run_ranks(with_and_without_checks, 2, tmp_path, timeout=240):
        grown = [after - before for before, after in zip(bare, checked, strict=True)]
        # Signatures keep the addresses of the last 16 groups of tensors, and scratch for each stream.
        assert max(grown) <= 16 << 10, (bare, checked)


def test_a_saved_call_is_what_was_called_although_training_goes_on():
    device = torch.device("cuda")
    batch = torch.ones(1 << 26, device=device)  # its copy takes milliseconds
    made = Invocation.of((batch,), {}, device, keep=True)
    made.gradients[0] = torch.ones(4, device=device)
    saved = SavedCall.of(made)
    batch.add_(1)
    kept, gradient = saved.tensors
    assert kept.is_pinned()
    assert torch.equal(kept, torch.ones_like(kept))
    assert torch.equal(gradient, torch.ones(4))
