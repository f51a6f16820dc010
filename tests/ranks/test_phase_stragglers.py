"""Real jobs with a rank that is slow to fetch batches or to read or write checkpoints (paper, section 6)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.hangs import QUICK, Net, incidents
from tests.support.ranks import run_ranks
from torchscout.decision.record import Action, Incident, Manifestation, Scope
from torchscout.integration.attach import enable_resiliency

SOON = replace(QUICK, floor_seconds=5.0, repeat_seconds=0.5)
"""Surveys follow each other quickly, and no step is long enough for a hang."""
SLOW = 0.3
PURPOSES = {
    "input": "to fetch a batch",
    "checkpoint_read": "to read a checkpoint",
    "checkpoint_write": "to write a checkpoint",
}
with_each_phase = pytest.mark.parametrize("phase", PURPOSES)
with_each_phase_in_time = pytest.mark.parametrize(
    "phase",
    ["checkpoint_write", *(pytest.param(name, marks=pytest.mark.slow) for name in list(PURPOSES)[:2])],
)
"""As above, but one of them in an ordinary run."""


def job(rank: int, run_dir: Path, phase: str, slow: tuple[int, ...]) -> dict[str, Any]:
    """Every step has the phase, which is slow on some ranks; returns the session's status at the end."""
    seconds = SLOW if rank in slow else 0.0
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    with enable_resiliency(model, optimizer, observer=SOON, run_dir=run_dir) as session:
        kind: Any = phase.removeprefix("checkpoint_")
        for batch in session.watch_input(batches(seconds if phase == "input" else 0.0)):
            time.sleep(0.02)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            with nullcontext() if phase == "input" else session.checkpoint_io(kind):
                time.sleep(0.0 if phase == "input" else seconds)
        dist.barrier()
        status = session.status()
        dist.barrier()  # who leaves says goodbye, and that is a message
    return status


def batches(seconds: float) -> Iterator[torch.Tensor]:
    for _ in range(20):
        time.sleep(seconds)
        yield torch.randn(4, 16)


def only_incident(run_dir: Path, phase: str) -> Incident:
    (incident,) = incidents(run_dir)
    assert (incident.manifestation, incident.action) == (Manifestation.STRAGGLER, Action.INSPECT)
    assert incident.records[0].surface == f"time/{phase}"
    return incident


@with_each_phase
def test_a_rank_that_is_slow_in_a_phase_is_named_once(tmp_path: Path, phase: str):
    run_ranks(job, 4, tmp_path, phase, (1,), timeout=90)
    incident = only_incident(tmp_path, phase)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (1,))
    assert "rank 1" in incident.sentence
    assert f"{PURPOSES[phase]} where its peers take" in incident.sentence


@with_each_phase_in_time
def test_two_ranks_of_which_one_is_slow_are_named_together(tmp_path: Path, phase: str):
    run_ranks(job, 2, tmp_path, phase, (1,), timeout=90)
    incident = only_incident(tmp_path, phase)
    assert (incident.scope, incident.ranks) == (Scope.PEER_GROUP, (0, 1))
    assert f"{PURPOSES[phase]} where its peer takes" in incident.sentence
    assert "two peers have no majority" in incident.sentence


@with_each_phase_in_time
def test_ranks_that_are_alike_and_quick_have_nothing_to_say(tmp_path: Path, phase: str):
    for status in run_ranks(job, 4, tmp_path, phase, (), timeout=90):
        assert (status["observer"]["messages"], status["failures"]) == (0, [])
    assert incidents(tmp_path) == []


@with_each_phase_in_time
def test_ranks_that_are_alike_and_slow_confer_and_find_nothing(tmp_path: Path, phase: str):
    for status in run_ranks(job, 4, tmp_path, phase, (0, 1, 2, 3), timeout=90):
        assert status["observer"]["rounds"] > 0
        assert status["failures"] == []
    assert incidents(tmp_path) == []
