"""Jobs of the catalog whose state changes by itself between two updates, where no other rank has a copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.job import Job, Report, Trial


@dataclass(frozen=True)
class Resting:
    trial: Trial
    job: str = "fsdp2"
    what: str = "weight"
    """That a flip changes, or a slot of the optimizer."""
    clipped: str = ""
    """How training writes to a weight between updates: ``counted`` by PyTorch, by ``data``, so ``once``."""


class RestingJob(Job):
    def __init__(self, rank: int, resting: Resting) -> None:
        super().__init__(rank, resting.trial)
        self._resting = resting

    def attach(self, model: Any, optimizer: Any, **settings: Any) -> None:
        weight, what = model.blocks[1].up.weight, self._resting.what
        self._clipped = model.blocks[0].up.bias
        settings["weight"] = lambda: weight if what == "weight" else optimizer.state[weight][what]
        super().attach(model, optimizer, **settings)

    @torch.no_grad()
    def end(self, step: int) -> None:
        super().end(step)
        if (how := self._resting.clipped) == "counted":
            self._clipped.clamp_(-0.01, 0.01)
        elif how == "data" or (how == "once" and step == 7):
            self._clipped.data.mul_(0.9)


def resting(rank: int, asked: Iterator[Resting]) -> Iterator[Report]:
    for each in asked:
        job = RestingJob(rank, each)
        CATALOG[each.job].train(job)
        yield job.finish()
