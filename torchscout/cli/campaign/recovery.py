"""What ranks run whose job is to be recovered: training that keeps what checks certify (paper, section 8)."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchscout.attach import enable_resiliency
from torchscout.cli.campaign.layout import Layout
from torchscout.cli.campaign.training import Training
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.faults.injector import Firing, Injector
from torchscout.faults.plan import FaultPlan

__all__ = ["STEPS", "Told", "train"]

STEPS = 5


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank has to tell."""

    fired: list[Firing]
    failures: list[str]
    poisoned: int | None
    """The step at which its checkpoints say that corruption was found."""
    resumed: int
    """The step that it went on from; 0 for a job that began."""
    digests: dict[int, str] = field(default_factory=dict)
    """All state after each step, and after that of a checkpoint once it was loaded."""


class Counter:
    """State that is the caller's own, with a random number generator of its own."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.drawn: list[float] = []

    def draw(self) -> None:
        self.drawn.append(self.random.random())

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.getstate(), "drawn": list(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))
        self.drawn = list(state["drawn"])


def train(rank: int, layout: Layout, faults: FaultPlan, run_dir: Path, directory: Path) -> Told:
    """Go on from a checkpoint, if there is one, with a check after each step, until corruption is found."""
    logging.getLogger("torchscout").addHandler(logging.NullHandler())  # the campaign tells what was found
    training, counter = Training(layout), Counter()
    digests: dict[int, str] = {}
    with (
        Injector(faults, rank, training.net, training.optimizer) as injector,
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=ReplayConfig(interval=1),
            observer=None,
            checkpoint=CheckpointConfig(directory),
            run_dir=run_dir,
        ) as session,
    ):
        session.register_state("counter", counter)
        resumed = session.resume()
        if resumed.step:
            digests[resumed.step] = _digest(training, counter)
        poisoned = None
        for step in range(session.step + 1, STEPS + 1):
            training.step(step)
            counter.draw()  # as a schedule's step, which belongs to the update before it
            digests[step] = _digest(training, counter)
            poisoned = session.status()["checkpoint"]["poisoned"]
            if poisoned is not None:
                break
        return Told(injector.fired, session.failures, poisoned, resumed.step, digests)


def _digest(training: Training, counter: Counter) -> str:
    return f"{training.digest()} {counter.state_dict()}"
