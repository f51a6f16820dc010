"""What watching state with one owner takes of a step, on the CPU."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism, ReplayConfig
from torchscout.testing.local_ranks import run_ranks

RANKS, WIDTH, LAYERS, ROWS = 2, 1024, 12, 256
INTERVAL, WARM, WINDOWS = 10, 10, 3
"""Steps from one check to the next; steps before anything is measured; windows of so many steps each."""
CONFIGS: dict[str, ReplayConfig | None] = {
    "without torchscout": None,
    "not watched": ReplayConfig(recipes={"layer": INTERVAL, "optimizer": INTERVAL}),
    "watched": ReplayConfig(interval=INTERVAL),
    "watch_budget=0.01": ReplayConfig(interval=INTERVAL, watch_budget=0.01),
}


def cost() -> dict[str, dict[str, Any]]:
    """Medians over the steps without a check, and over all steps of a window, of the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(_steps, RANKS, Path(folder), timeout=1200)
    held = found[0]["held"]
    rows = {}
    for name in CONFIGS:
        plain = max(each["plain"][name] for each in found)
        every = max(each["every"][name] for each in found)
        bare = max(each["plain"]["without torchscout"] for each in found)
        bare_every = max(each["every"]["without torchscout"] for each in found)
        rows[name] = {
            "step_ms": round(plain * 1e3, 1),
            "ratio": round(plain / bare, 3),
            "step_with_checks_ms": round(every * 1e3, 1),
            "ratio_with_checks": round(every / bare_every, 3),
        }
        if (share := found[0]["watched"].get(name)) is not None:
            rows[name] |= {"watched": round(share, 3), "state_mb": round(held / 1e6, 1)}
            rows[name]["signed_mb_per_second"] = round(2 * share * held / plain / 1e6)
    return rows


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + nn.functional.gelu(self.up(self.norm(x)))
        return out


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def _steps(rank: int, folder: Path) -> dict[str, Any]:
    jobs = {}
    for place, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(0)
        net = _Net()
        for module in [*net.layers, net]:
            fully_shard(module)
        optimizer, session = torch.optim.AdamW(net.parameters(), foreach=False), None
        if config is not None:
            session = enable_resiliency(
                net,
                optimizer,
                replay=config,
                observer=None,
                parallelism=Parallelism(shard=RANKS),
                run_dir=folder / str(place),
            )
        jobs[name] = (net, optimizer, session)
    drawn = torch.Generator().manual_seed(rank)
    tokens = torch.randint(64, (ROWS,), generator=drawn)
    times: dict[str, list[float]] = {name: [] for name in CONFIGS}
    for _ in range(WARM + INTERVAL * WINDOWS):
        for name, (net, optimizer, _) in jobs.items():  # in turn, so that all meet the same noise
            dist.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(tokens), (tokens + 1) % 64).backward()
            optimizer.step()
            times[name].append(time.perf_counter() - begin)
    net, optimizer, _ = jobs["watched"]
    slots = [each for every in optimizer.state.values() for each in every.values()]
    shards = [getattr(each, "_local_tensor", each) for each in [*net.parameters(), *slots]]
    found = {
        "held": sum(each.numel() * each.element_size() for each in shards),
        "plain": {name: statistics.median(_without_checks(each)) for name, each in times.items()},
        "every": {name: _with_checks(each) for name, each in times.items()},
        "watched": {
            name: session.status()["replay"]["watched"]
            for name, (_, _, session) in jobs.items()
            if session is not None
        },
    }
    dist.barrier()
    for _, _, session in jobs.values():
        if session is not None:
            session.close()
    return found


def _without_checks(times: list[float]) -> list[float]:
    return [each for step, each in enumerate(times, 1) if step > WARM and step % INTERVAL]


def _with_checks(times: list[float]) -> float:
    """Median over windows that end with a check, of the mean of their steps."""
    rest = times[WARM:]
    windows = [rest[begin : begin + INTERVAL] for begin in range(0, len(rest), INTERVAL)]
    return statistics.median(statistics.mean(each) for each in windows)
