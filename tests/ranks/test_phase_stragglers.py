"""Real jobs whose input is slow on one rank, which slows all of them (paper, section 6)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.hangs import QUICK, Net, incidents
from tests.support.ranks import run_ranks
from torchscout.decision.record import Action, Manifestation, Scope
from torchscout.integration.attach import enable_resiliency

SOON = replace(QUICK, floor_seconds=5.0, repeat_seconds=0.5)
"""Surveys follow each other quickly, and no step is long enough for a hang."""


def job(rank: int, run_dir: Path, slow: int | None) -> dict[str, Any]:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    with enable_resiliency(model, optimizer, observer=SOON, run_dir=run_dir) as session:
        for batch in session.watch_input(batches(0.3 if rank == slow else 0.0)):
            time.sleep(0.02)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        dist.barrier()
        status = session.status()
        dist.barrier()  # who leaves says goodbye, and that is a message
    return status


def batches(seconds: float) -> Iterator[torch.Tensor]:
    for _ in range(20):
        time.sleep(seconds)
        yield torch.randn(4, 16)


def test_a_rank_that_waits_for_its_input_is_named_once(tmp_path: Path):
    run_ranks(job, 4, tmp_path, 1, timeout=90)
    (incident,) = incidents(tmp_path)
    assert (incident.manifestation, incident.scope) == (Manifestation.STRAGGLER, Scope.RANK)
    assert (incident.ranks, incident.action) == ((1,), Action.INSPECT)
    assert incident.records[0].surface == "time/input"
    assert "rank 1" in incident.sentence
    assert "to fetch a batch where its peers take" in incident.sentence


def test_ranks_whose_input_is_alike_have_nothing_to_say(tmp_path: Path):
    for status in run_ranks(job, 4, tmp_path, None, timeout=90):
        assert (status["observer"]["messages"], status["failures"]) == (0, [])
    assert incidents(tmp_path) == []
