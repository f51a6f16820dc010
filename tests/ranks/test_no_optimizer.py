"""A real job that gives no optimizer to watch: its steps are seen all the same (paper, section 7)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.hangs import FAULTY_STEP, QUICK, STEPS, Net, incidents, wait_for_incident
from tests.support.ranks import run_ranks
from torchscout.attach import enable_resiliency

PATIENT_AT_FIRST = replace(QUICK, startup_seconds=600.0)


class Checkpointed(Net):
    """Each layer's forward runs once more in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def job(rank: int, run_dir: Path, stalls: int) -> int:
    """The updates are the user's own; returns the steps that were seen."""
    model = DistributedDataParallel(Checkpointed())
    with enable_resiliency(model, observer=PATIENT_AT_FIRST, run_dir=run_dir) as session:
        for step in range(1, STEPS + 1):
            time.sleep(0.02)
            if step == FAULTY_STEP and rank == stalls:
                wait_for_incident(run_dir)
            model(torch.randn(4, 16)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.01)
                    parameter.grad = None
        return session.step


def test_a_late_rank_is_named_in_a_job_without_an_optimizer(tmp_path: Path):
    # That a step is over shows when the next one begins.
    assert run_ranks(job, 4, tmp_path, 2, timeout=90) == [STEPS - 1] * 4
    (incident,) = incidents(tmp_path)
    assert incident.ranks == (2,)
