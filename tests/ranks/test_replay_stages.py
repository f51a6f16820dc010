"""Ranks that do not all have the same to replay, as pipeline stages: they stay in step all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.ranks import run_ranks
from tests.support.replayed_job import Block, Net, batch
from torchscout.attach import enable_resiliency
from torchscout.config import Parallelism, ReplayConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan


class Middle(nn.Module):
    """A stage of hidden layers alone, more of them than the other has."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.stack:
            x = block(x)
        return x


def stages(rank: int, run_dir: Path, faults: FaultPlan) -> tuple[list[str], list[tuple], dict]:
    """Three replicas of two stages, each trained by itself: what travels between them is not the point."""
    stage = rank % 2
    torch.manual_seed(stage)
    model = Middle() if stage else Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Injector(faults, rank, model, optimizer) as injector:
        session = enable_resiliency(
            model,
            optimizer,
            replay=ReplayConfig(interval=1),
            observer=None,
            parallelism=Parallelism(replica=3, pipeline=2),
            run_dir=run_dir,
        )
        for step in range(1, 6):
            tokens, _ = batch(step, 0)  # the same for all replicas, so that they need no all-reduce
            x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step)) if stage else tokens
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(x).square().mean().backward()
            optimizer.step()
        assert injector.unfired == []
    found = [(each.ranks, each.records[0].surface, each.step) for each in session.incidents]
    status = session.status()
    session.close()
    return session.failures, found, status["replay"]


def test_stages_with_other_parts_stay_in_step(tmp_path: Path):
    for rank, (failures, found, replay) in enumerate(run_ranks(stages, 6, tmp_path, FaultPlan(), timeout=90)):
        assert failures == []
        assert found == []
        assert replay["checks"] == 5
        assert replay["not_checked"] == {}
        assert ("embedding" in replay["coverage"]) == (rank % 2 == 0)
        assert replay["coverage"]["layer"]["targets"] == (3 if rank % 2 else 2)
        assert all(last["clean"] for last in replay["last"].values())


@pytest.mark.long
def test_a_fault_in_one_stage_is_named_there_and_repeats_in_step(tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=2, at="tokens/output", step=2, bit=1, calls=range(1, 200))
    faults = faults.flip_bit(rank=5, at="stack.2/output", step=3, bit=1, calls=range(1, 200))
    for failures, found, _ in run_ranks(stages, 6, tmp_path, faults, timeout=90):
        assert failures == []
        assert sorted(found) == [((2,), "tokens/output", 2), ((5,), "stack.2/output", 3)]


def one_without_optimizer(rank: int, run_dir: Path) -> str:
    model = Net()
    optimizer = None if rank == 1 else torch.optim.AdamW(model.parameters())
    with enable_resiliency(
        model, optimizer, observer=None, parallelism=Parallelism(replica=3), run_dir=run_dir
    ) as session:
        return session.status()["replay"]["off"]


def test_replay_is_off_everywhere_if_one_rank_has_no_optimizer(tmp_path: Path):
    off = run_ranks(one_without_optimizer, 3, tmp_path, timeout=60)
    why = "there is no optimizer whose update would end a step"
    assert off == [f"rank 1: {why}", why, f"rank 1: {why}"]
