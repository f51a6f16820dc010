"""Real jobs that announce no phases: fetching a batch is recognized (paper, section 9)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.support.hangs import QUICK, Net, incidents
from tests.support.ranks import may_have_children, run_ranks
from torchscout.attach import enable_resiliency
from torchscout.decision.types import Action, Manifestation, Scope

SOON = replace(QUICK, min_silence_seconds=5.0, repeat_seconds=0.5)
"""Surveys follow each other quickly, and no step is long enough for a hang."""
SLOW, BATCHES = 0.3, 20
EPOCHS = 4
"""Until a slow rank is reported: on a busy machine, observers may not look at it often enough in one."""


class Samples(Dataset[torch.Tensor]):
    """Random samples of 16 numbers, which may take some time."""

    def __init__(self, seconds: float, count: int = BATCHES) -> None:
        self.seconds, self.count = seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((16,), float(index)) / self.count


def train(
    rank: int,
    run_dir: Path,
    slow: tuple[int, ...],
    workers: int,
    attached: bool,
) -> dict[str, Any]:
    """Train on batches of a DataLoader; returns the session's status and all state."""
    may_have_children()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(
        Samples(SLOW if rank in slow else 0.0),
        num_workers=workers,
        shuffle=True,
        multiprocessing_context="fork" if workers else None,  # others import torch again
    )
    session = None
    if attached:
        session = enable_resiliency(model, optimizer, observer=SOON, run_dir=run_dir)
    for _ in range(EPOCHS if slow else 1):
        for batch in loader:
            time.sleep(0.02)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        is_found = torch.tensor([bool(incidents(run_dir))])
        dist.broadcast(is_found, 0)
        if is_found:
            break
    dist.barrier()
    status = {} if session is None else session.status()
    dist.barrier()  # who leaves says goodbye, and that is a message
    if session is not None:
        session.close()
    return {"status": status, "state": [*model.state_dict().values(), torch.get_rng_state()]}


@pytest.mark.long
def test_a_rank_whose_dataset_is_slow_is_named_in_its_input(tmp_path: Path):
    run_ranks(train, 4, tmp_path, (1,), 0, True, timeout=120)
    (incident,) = incidents(tmp_path)
    assert (incident.manifestation, incident.action) == (Manifestation.STRAGGLER, Action.INSPECT)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (1,))
    assert "batch" in incident.sentence


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_fault_training_is_bitwise_the_same_and_nothing_is_said(tmp_path: Path, workers: int):
    with_it = run_ranks(train, 2, tmp_path, (), workers, True, timeout=120)
    without = run_ranks(train, 2, tmp_path, (), workers, False, timeout=120)
    for one, other in zip(with_it, without, strict=True):
        assert one["status"]["failures"] == []
        assert all(torch.equal(a, b) for a, b in zip(one["state"], other["state"], strict=True))
    assert incidents(tmp_path) == []
