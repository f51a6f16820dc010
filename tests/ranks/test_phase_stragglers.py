"""Real jobs with a rank that is slow to fetch batches or to read or write checkpoints (paper, section 6)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support.hangs import QUICK, Net, incidents
from tests.support.ranks import run_ranks
from torchscout.attach import enable_resiliency
from torchscout.decision.types import Action, Manifestation, Scope
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

SOON = replace(QUICK, min_silence_seconds=5.0, repeat_seconds=0.5)
"""Surveys follow each other quickly, and no step is long enough for a hang."""
SLOW, STEPS = 0.3, 20
MOST_STEPS = 10 * STEPS
"""On a busy machine, surveys may take longer than the job would."""
with_each_phase = pytest.mark.parametrize(
    "phase",
    [
        "checkpoint_write",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("input", "checkpoint_read")),
    ],
)


def job(rank: int, run_dir: Path, phase: str, faults: FaultPlan) -> dict[str, Any]:
    """Every step has the phase; returns the session's status at the end. If one rank alone is slow, train
    until that is reported."""
    is_expected = len([*faults]) == 1
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        enable_resiliency(model, optimizer, observer=SOON, run_dir=run_dir) as session,
        Injector(faults, rank, model.module, optimizer) as injector,
    ):
        kind: Any = phase.removeprefix("checkpoint_")
        batches = session.watch_input(injector.input(torch.randn(4, 16) for _ in range(MOST_STEPS)))
        for step, batch in enumerate(batches, 1):
            time.sleep(0.02)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if phase != "input":
                with session.checkpoint_io(kind), injector.checkpoint_io(kind):
                    pass
            if step >= STEPS:
                dist.broadcast(enough := torch.tensor(not is_expected or bool(incidents(run_dir))), 0)
                if enough:
                    break
        dist.barrier()
        status = session.status()
        dist.barrier()  # who leaves says goodbye, and that is a message
    assert injector.unfired == []
    return status


def slow(phase: str, *ranks: int) -> FaultPlan:
    faults = FaultPlan()
    for rank in ranks:
        faults = faults.delay(rank=rank, at=phase, step=range(1, MOST_STEPS + 1), seconds=SLOW)
    return faults


@with_each_phase
def test_a_rank_that_is_slow_in_a_phase_is_named_once(tmp_path: Path, phase: str):
    faults = slow(phase, 1)
    run_ranks(job, 4, tmp_path, phase, faults, timeout=90)
    (incident,), (truth,) = incidents(tmp_path), faults.truth(Mesh.grid(replica=4))
    assert truth.matches(incident), (truth, incident.sentence)
    assert (incident.manifestation, incident.action) == (Manifestation.STRAGGLER, Action.INSPECT)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (1,))
    assert {each.surface for each in incident.records} == {truth.surface}


@pytest.mark.long
def test_ranks_that_are_alike_and_quick_have_nothing_to_say(tmp_path: Path):
    phase = "checkpoint_write"
    for status in run_ranks(job, 4, tmp_path, phase, slow(phase), timeout=90):
        assert (status["observer"]["messages"], status["failures"]) == (0, [])
    assert incidents(tmp_path) == []


@pytest.mark.long
def test_ranks_that_are_alike_and_slow_confer_and_find_nothing(tmp_path: Path):
    phase = "input"
    for status in run_ranks(job, 4, tmp_path, phase, slow(phase, 0, 1, 2, 3), timeout=90):
        assert status["observer"]["rounds"] > 0
        assert status["failures"] == []
    assert incidents(tmp_path) == []
