"""Kernels on a CUDA device that do not repeat by themselves: healthy ranks are silent, and certified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.ranks import run_ranks
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism, ReplayConfig
from torchscout.decision.types import Manifestation
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS, STEPS = 3, 24
WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 64, 4, 256, 4, 100
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def mix(mixed: torch.Tensor) -> torch.Tensor:
        q, k, v = mixed.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(ATTENTION[name]):
            found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.transpose(1, 2).flatten(2)

    return mix


def index_add(mixed: torch.Tensor) -> torch.Tensor:
    """Into few rows, so that many additions meet."""
    rows, part = torch.arange(LENGTH, device=mixed.device) % 8, mixed[..., :WIDTH]
    few = torch.zeros(BATCH, 8, WIDTH, device=mixed.device, dtype=part.dtype)
    return few.index_add(1, rows, part)[:, rows] / 32


def scatter_add(mixed: torch.Tensor) -> torch.Tensor:
    part = mixed[..., :WIDTH]
    rows = (torch.arange(LENGTH, device=mixed.device) % 8)[None, :, None].expand_as(part)
    few = torch.zeros(BATCH, 8, WIDTH, device=mixed.device, dtype=part.dtype)
    return few.scatter_add(1, rows, part).gather(1, rows) / 32


def upsample(mixed: torch.Tensor) -> torch.Tensor:
    """Refused in backward."""
    half = mixed[:, ::2, :WIDTH].float().transpose(1, 2)
    return nn.functional.interpolate(half, scale_factor=2, mode="linear").transpose(1, 2)


def pool(mixed: torch.Tensor) -> torch.Tensor:
    """Refused in backward."""
    half = nn.functional.adaptive_avg_pool2d(mixed[..., :WIDTH].float(), (LENGTH // 2, WIDTH))
    return torch.cat([half, half], dim=1)


def put(mixed: torch.Tensor) -> torch.Tensor:
    """Refused in forward."""
    part = mixed[..., :WIDTH].contiguous()
    return torch.zeros_like(part).put_(torch.arange(part.numel(), device=part.device), part)


KERNELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: attention(name) for name in ATTENTION},
    **{each.__name__: each for each in (index_add, scatter_add, upsample, pool, put)},
    "atomics": lambda mixed: mixed[..., :WIDTH],  # the atomics are elsewhere in the block
}


class Block(nn.Module):
    """Attention by one backend, or one other kernel in its place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(WIDTH)
        self.mix, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.shift = nn.Identity()
        if kind == "atomics":
            from tests.support.atomic_sum import AtomicBias

            self.shift = AtomicBias(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + KERNELS[self.kind](self.mix(self.norm(x)))
        return x + self.down(nn.functional.gelu(self.up(self.shift(x))))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Found:
    bits: bytes
    incidents: list[tuple[tuple[int, ...], str]]
    """Of wrong numbers."""
    certified: int | None
    replay: dict[str, Any]
    fired: int


def train(rank: int, kind: str, run_dir: Path | None, faults: FaultPlan, steps: int) -> Found:
    torch.manual_seed(0)
    model = Net(kind).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with Injector(faults, rank, model, optimizer) as injector:
        session = run_dir and enable_resiliency(
            model,
            optimizer,
            replay=ReplayConfig(interval=1),
            observer=None,
            parallelism=Parallelism(replica=RANKS),
            run_dir=run_dir,
        )
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 * step + rank)
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= RANKS
            optimizer.step()
    torch.distributed.barrier()
    bits = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    if not session:
        return Found(bits, [], None, {}, len(injector.fired))
    with session:
        assert session.failures == []
        wrong = [each for each in session.incidents if each.manifestation is Manifestation.SDC]
        accused = [(each.ranks, each.sentence) for each in wrong]
        return Found(
            bits, accused, session.certified_step, dict(session.status()["replay"]), len(injector.fired)
        )


def run(kind: str, run_dir: Path, faults: FaultPlan = FaultPlan(), *, steps: int = STEPS) -> list[Found]:  # noqa: B008
    return run_ranks(train, RANKS, kind, run_dir, faults, steps, timeout=300)


@pytest.mark.parametrize("kind", [*ATTENTION, "index_add", "scatter_add"])
def test_what_has_a_deterministic_version_repeats_and_all_of_it_is_compared(kind: str, tmp_path: Path):
    for found in run(kind, tmp_path):
        assert found.incidents == []
        assert found.certified == STEPS
        refused = found.replay["not_repeating"]
        # Strict mode refuses cuDNN's attention, whose backward pass has no deterministic version.
        assert all(surface.endswith(("grad", "grad_input")) for surface in refused)
        assert bool(refused) is (kind == "cudnn")
        assert found.replay["not_checked"] == refused


def test_a_triton_kernel_with_atomics_names_nobody_and_the_rest_is_certified(tmp_path: Path):
    pytest.importorskip("triton")
    for found in run("atomics", tmp_path):
        assert found.incidents == []
        assert found.certified is not None
        assert found.certified >= STEPS - 2, "a difference that nothing explains yet may delay it"
        assert {*found.replay["not_repeating"]} <= {f"layers.{place}.shift/bias.grad" for place in (0, 1)}
        assert found.replay["last"]["layers.0"]["clean"]


@pytest.mark.parametrize(
    ("kind", "operator"),
    [
        ("upsample", "upsample_linear1d_backward_out_cuda"),
        ("pool", "adaptive_avg_pool2d_backward_cuda"),
        ("put", "put_"),
    ],
)
def test_an_operator_without_a_deterministic_version_is_replayed_and_marked(
    kind: str, operator: str, tmp_path: Path
):
    for found in run(kind, tmp_path, steps=6):
        assert found.incidents == []
        assert found.certified == 6
        marked = found.replay["not_repeating"]
        assert marked["layers.0/grad_input"] == (
            f"nondeterministic kernel: {operator} does not have a deterministic implementation"
        )
        assert ("layers.0/output" in marked) == (kind == "put")


@pytest.mark.parametrize("kind", ["flash", "atomics", "upsample"])
def test_a_rank_that_is_wrong_is_named_under_each(kind: str, tmp_path: Path):
    if kind == "atomics":
        pytest.importorskip("triton")
    faults = FaultPlan().flip_bit(rank=1, at="layers.1/output", step=4, bit=3, calls=range(1, 200))
    results = run(kind, tmp_path, faults, steps=5)
    assert results[1].fired
    ((ranks, sentence),) = results[0].incidents
    assert ranks == (1,)
    assert "layers.1/output" in sentence
    assert "(persistent)" in sentence


def with_and_without(rank: int, kind: str, run_dir: Path) -> tuple[bytes, bool, Found]:
    # Strict, PyTorch refuses cuDNN's attention, whose backward does not repeat.
    torch.use_deterministic_algorithms(kind != "cudnn")
    alone, again = (train(rank, kind, None, FaultPlan(), 8) for _ in range(2))
    return alone.bits, alone.bits == again.bits, train(rank, kind, run_dir, FaultPlan(), 8)


@pytest.mark.parametrize("kind", [*ATTENTION, "index_add"])
def test_training_that_repeats_is_bitwise_the_training_without_checks(kind: str, tmp_path: Path):
    for alone, repeats, found in run_ranks(with_and_without, RANKS, kind, tmp_path, timeout=300):
        assert repeats or kind == "cudnn"
        assert found.bits == alone or not repeats
        assert found.incidents == []
        assert found.certified == 8
