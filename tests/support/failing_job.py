"""A job of the catalog whose first block raises whenever it is replayed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.job import Job, Report, Trial
from torchscout.utils.reentrancy import in_own_work


@dataclass(frozen=True, slots=True)
class Failing:
    ranks: tuple[int, ...] = ()
    """On these ranks."""
    within: str = "forward"
    """In this pass: ``forward``, ``backward``, or at its ``entry``, before FSDP sees the call."""

    def apply(self, block: nn.Module) -> None:
        if self.within == "entry":
            block.register_forward_pre_hook(_fail, prepend=True)
        else:
            fail = _fail if self.within == "forward" else _fail_in_backward
            block.get_submodule("up").register_forward_hook(fail)


FAILURES = [Failing((1,), within) for within in ("entry", "forward", "backward")]
"""On one rank."""


class FailingJob(Job):
    def __init__(self, rank: int, trial: Trial, failing: Failing) -> None:
        super().__init__(rank, trial)
        self._failing = failing

    def attach(self, model: Any, *args: Any, **settings: Any) -> None:
        super().attach(model, *args, **settings)
        if self.rank in self._failing.ranks:
            self._failing.apply(model.blocks[0])


def with_failures(rank: int, name: str, failures: list[Failing], run_dir: Path) -> list[tuple[bool, Report]]:
    """Train without torchscout, and once with each failure: whether it was the same, and what was found."""
    alone = train(rank, name, Trial(steps=4))
    found = []
    for place, each in enumerate(failures):
        trial = Trial(steps=4, interval=1, run_dir=run_dir / str(place), keeps_records=True)
        found.append(train(rank, name, trial, each))
    return [(alone.bits == each.bits, each) for each in found]


def train(rank: int, name: str, trial: Trial, failing: Failing = Failing()) -> Report:  # noqa: B008  frozen
    job = FailingJob(rank, trial, failing)
    CATALOG[name].train(job)
    return job.finish()


def _fail(*_: object) -> None:
    if in_own_work():
        raise torch.OutOfMemoryError("no memory is left for a replay")


def _fail_in_backward(_: nn.Module, __: object, output: torch.Tensor) -> None:
    output.register_hook(_fail)
