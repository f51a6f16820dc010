"""What warm ranks run: training with a check at every step, one cell after another (paper, evaluation)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torchscout.attach import enable_resiliency
from torchscout.cli.campaign.layout import Layout
from torchscout.cli.campaign.training import Training
from torchscout.config import ReplayConfig
from torchscout.faults.injector import Firing, Injector
from torchscout.faults.plan import FaultPlan

__all__ = ["EVERY_STEP", "Stretch", "Told", "train"]

EVERY_STEP = ReplayConfig(interval=1)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What ranks are asked for: to train on."""

    last: int
    """Up to this step."""
    restored_after: int | None = None
    """After this step, put back the state from before it."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank has to tell of it."""

    fired: list[Firing]
    failures: list[str]
    step_seconds: dict[int, float] = field(default_factory=dict)
    """What each step took here, checks not counted: what a rank knows without replay."""


def train(
    rank: int,
    stretches: Iterator[Stretch],
    layout: Layout,
    faults: FaultPlan,
    run_dir: Path,
    seed: int,
    replay: ReplayConfig = EVERY_STEP,
) -> Iterator[Told]:
    """Go on with one training from stretch to stretch."""
    logging.getLogger("torchscout").addHandler(logging.NullHandler())  # the campaign tells what was found
    training = Training(layout, seed)
    with (
        Injector(faults, rank, training.net, training.optimizer) as injector,
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=replay,
            observer=None,
            parallelism=layout.mesh() if layout.apart else None,
            run_dir=run_dir,
        ) as session,
    ):
        updates = _Updates(training.optimizer)
        for stretch in stretches:
            fired, failed = len(injector.fired), len(session.failures)
            updates.seconds.clear()
            for step in range(session.step + 1, stretch.last + 1):
                before = _copied(training) if step == stretch.restored_after else []
                updates.begin(step)
                training.step(step)
                if before:
                    _restore(training, before)
            stopped = [] if session.replaying is not None else [session.not_replaying]
            yield Told(injector.fired[fired:], [*session.failures[failed:], *stopped], dict(updates.seconds))


class _Updates:
    """Times each step up to its update, which is where a check begins."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seconds: dict[int, float] = {}
        self._step, self._began = 0, 0.0
        optimizer.register_step_pre_hook(lambda *_: self._end())

    def begin(self, step: int) -> None:
        self._step, self._began = step, time.perf_counter()

    def _end(self) -> None:
        self.seconds[self._step] = time.perf_counter() - self._began


def _copied(training: Training) -> list[torch.Tensor]:
    return [each.clone() for each in training.state()]


def _restore(training: Training, before: list[torch.Tensor]) -> None:
    """As a recovery would."""
    for each, saved in zip(training.state(), before, strict=True):
        each.copy_(saved)
