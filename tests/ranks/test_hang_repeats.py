"""The paper's 120 of 120 and 30 of 30: random ranks, places and delays, each attributed exactly."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.test_hangs import TRAINING, communicating_job, ddp_job
from tests.support.hangs import FAULTY_STEP, QUICK, Net, incidents, steps, wait_for_incident
from tests.support.ranks import RankError, run_ranks
from torchscout.attach import enable_resiliency
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan

pytestmark = pytest.mark.slow

REPEATS = range(30)
RANKS = 4


def stall(generator: random.Random, rank: int, place: str) -> FaultPlan:
    return FaultPlan().stall(rank=rank, at=place, step=FAULTY_STEP, seconds=generator.uniform(4.0, 6.0))


def names_exactly(run_dir: Path, rank: int) -> None:
    wait_for_incident(run_dir)
    assert {incident.ranks for incident in incidents(run_dir)} == {(rank,)}


def fsdp_job(rank: int, run_dir: Path, faults: FaultPlan) -> int:
    model = Net()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        enable_resiliency(model, optimizer, observer=QUICK, run_dir=run_dir),
        Injector(faults, rank, model, optimizer) as injector,
    ):
        for _ in steps():
            optimizer.zero_grad()
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
    return len(injector.fired)


@pytest.mark.parametrize("seed", REPEATS)
@pytest.mark.parametrize(
    ("job", "first", "places"),
    [
        pytest.param(ddp_job, 0, ["step", "1/forward", "2/forward", "3/backward"], id="all-reduce"),
        pytest.param(ddp_job, 100, ["input"], id="input"),
        pytest.param(fsdp_job, 300, ["0/forward", "1/forward", "2/forward", "3/forward"], id="all-gather"),
    ],
)
def test_a_late_rank(tmp_path: Path, job: Callable[..., Any], first: int, places: list[str], seed: int):
    generator = random.Random(first + seed)
    rank, place = generator.randrange(RANKS), generator.choice(places)
    run_ranks(job, RANKS, tmp_path, stall(generator, rank, place), timeout=120)
    names_exactly(tmp_path, rank)


@pytest.mark.parametrize("seed", REPEATS)
def test_another_collective(tmp_path: Path, seed: int):
    generator = random.Random(200 + seed)
    rank, hidden = generator.randrange(RANKS), generator.random() < 0.5
    what = generator.choice(["operation", "shape", "dtype"])
    faults = FaultPlan().change_collective(rank=rank, step=FAULTY_STEP, what=what, **TRAINING)
    with suppress(RankError):
        run_ranks(communicating_job, RANKS, tmp_path, faults, hidden, timeout=120)
    names_exactly(tmp_path, rank)


@pytest.mark.parametrize("seed", REPEATS)
def test_a_healthy_job(tmp_path: Path, seed: int):
    job = fsdp_job if seed % 2 else ddp_job
    run_ranks(job, RANKS, tmp_path, FaultPlan(), timeout=120)
    assert incidents(tmp_path) == []


def jittery_job(rank: int, run_dir: Path) -> int:
    """Many steps, each of a random length on each rank; how many messages its observer exchanged."""
    generator = random.Random(rank)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    with enable_resiliency(model, optimizer, observer=QUICK, run_dir=run_dir) as session:
        for _ in range(500):
            time.sleep(generator.expovariate(20))
            optimizer.zero_grad()
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
        messages: int = session.status()["observer"]["messages"]
        dist.barrier()  # who leaves says goodbye, and that is a message
    return messages


def test_many_healthy_steps_of_random_length(tmp_path: Path):
    assert run_ranks(jittery_job, RANKS, tmp_path, timeout=300) == [0] * RANKS
    assert incidents(tmp_path) == []
