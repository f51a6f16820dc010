"""Cells in which a job is corrupted, stopped and resumed."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torchscout.attach import enable_resiliency
from torchscout.campaign.cells.cell import Cell, JobLayout
from torchscout.campaign.cells.training import replay_on, retried, silence_log, training_of
from torchscout.campaign.grading import Flaw, Grade, unfired
from torchscout.campaign.results import Result, graded
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.faults.injector import Firing, Injector
from torchscout.faults.plan import FaultPlan
from torchscout.run.reader import IncidentLog
from torchscout.testing.local_ranks import RankError, run_ranks
from torchscout.testing.transformer import Training

__all__ = ["STEPS", "RecoveryRankResult", "run_recovery", "train"]

STEPS = 5


@dataclass(frozen=True, slots=True)
class RecoveryRankResult:
    """What one rank returns."""

    fired: list[Firing]
    failures: list[str]
    poisoned: int | None
    """The step at which corruption was found, according to its checkpoints."""
    resumed: int
    """The step that it resumed from; 0 for a job that started from the beginning."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digests of all state after each step, and after loading a checkpoint of that step."""


class Counter:
    """User state with its own random number generator."""

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


def train(
    rank: int, layout: JobLayout, faults: FaultPlan, run_dir: Path, directory: Path
) -> RecoveryRankResult:
    """Resume from a checkpoint, if there is one, and train until corruption is found; check every step."""
    silence_log()
    training, counter = training_of(layout), Counter()
    digests: dict[int, str] = {}
    with (
        Injector(faults, rank, training.net, training.optimizer) as injector,
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=replay_on(layout, ReplayConfig(interval=1)),
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
            counter.draw()  # like a scheduler's step, which belongs to the update before it
            digests[step] = _digest(training, counter)
            poisoned = session.status()["checkpoint"]["poisoned"]
            if poisoned is not None:
                break
        return RecoveryRankResult(injector.fired, session.failures, poisoned, resumed.step, digests)


def _digest(training: Training, counter: Counter) -> str:
    return f"{training.digest()} {counter.state_dict()}"


_SECONDS = 180.0


def run_recovery(cells: Sequence[Cell], folder: Path) -> Generator[Result, None, None]:
    """Run one cell after another; the evidence of those that fail stays in ``folder``."""
    for cell in cells:
        place = folder / cell.name
        shutil.rmtree(place, ignore_errors=True)  # left by an interrupted run
        result = _run(cell, place)
        if result.grade.passed:
            shutil.rmtree(place)
        yield result


def _run(cell: Cell, place: Path) -> Result:
    begin, reports, layout = time.monotonic(), IncidentLog(place), cell.place
    runs: list[list[RecoveryRankResult]] = []
    failures: list[str] = []
    try:
        for faults in (cell.faults, FaultPlan()):  # new processes resume from the checkpoints of the first
            args = (train, layout.ranks, layout, faults, place, place / "kept")
            runs.append(retried(partial(run_ranks, *args, timeout=_SECONDS, backend=layout.backend)))
    except RankError as error:
        failures = [error.in_short]
    failures = failures or [failure for run in runs for each in run for failure in each.failures]
    fired = [firing for each in (runs[0] if runs else ()) for firing in each.fired]
    happened = {(firing.rank, firing.at) for firing in fired}
    faulty = min(fault.steps[0] for fault in cell.faults)
    return graded(
        cell,
        reports.new(),
        fired,
        time.monotonic() - begin,
        unfired=unfired(cell.faults, happened) if runs else (),
        failures=failures,
        further=lambda _: recovered(faulty, *runs),
    )


def recovered(
    faulty: int, before: Sequence[RecoveryRankResult], after: Sequence[RecoveryRankResult]
) -> Grade:
    """Whether new processes resumed with bitwise the state before the step at which corruption was found."""
    if {each.poisoned for each in before} != {faulty}:
        poisoned = sorted({str(each.poisoned) for each in before})
        return Grade(Flaw.NOT_RECOVERED, f"checkpoints are poisoned at step {poisoned}, not at {faulty}")
    steps = {each.resumed for each in after}
    if steps != {faulty - 1}:
        return Grade(Flaw.NOT_RECOVERED, f"ranks resumed from step {sorted(steps)}, not from {faulty - 1}")
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        if old.digests[faulty - 1] != new.digests[faulty - 1]:
            return Grade(Flaw.NOT_RECOVERED, f"rank {rank} has other bits than after step {faulty - 1}")
        if max(new.digests) != STEPS:
            return Grade(Flaw.NOT_RECOVERED, f"rank {rank} reached step {max(new.digests)}, not {STEPS}")
    return Grade()
