"""Cells in which a job is corrupted, stopped and resumed."""

from __future__ import annotations

import logging
import random
import shutil
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchscout.attach import enable_resiliency
from torchscout.campaign.cell import Cell, JobLayout
from torchscout.campaign.grading import Flaw, Grade, grade, unfired
from torchscout.campaign.observed import retried
from torchscout.campaign.results import Result, found_in
from torchscout.campaign.training import Training
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.decision.record import Incident
from torchscout.decision.recorder import IncidentLog
from torchscout.faults.injector import Firing, Injector
from torchscout.faults.plan import FaultPlan
from torchscout.testing.local_ranks import RankError, run_ranks

__all__ = ["STEPS", "RecoveryRankResult", "run_recovery", "train"]

STEPS = 5


@dataclass(frozen=True, slots=True)
class RecoveryRankResult:
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


def train(
    rank: int, layout: JobLayout, faults: FaultPlan, run_dir: Path, directory: Path
) -> RecoveryRankResult:
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
        return RecoveryRankResult(injector.fired, session.failures, poisoned, resumed.step, digests)


def _digest(training: Training, counter: Counter) -> str:
    return f"{training.digest()} {counter.state_dict()}"


_SECONDS = 180.0
_REASON_CHARACTERS = 600


def run_recovery(cells: Sequence[Cell], folder: Path) -> Generator[Result, None, None]:
    """One after another; the evidence of those that fail stays in ``folder``."""
    for cell in cells:
        place = folder / cell.name
        shutil.rmtree(place, ignore_errors=True)  # of a run that was interrupted
        result = _run(cell, place)
        if result.grade.passed:
            shutil.rmtree(place)
        yield result


def _run(cell: Cell, place: Path) -> Result:
    begin, layout = time.monotonic(), cell.place
    reports, told, again = (
        IncidentLog(place, strict=True),
        list[RecoveryRankResult](),
        list[RecoveryRankResult](),
    )
    problem = ""
    try:
        told, again = (_trained(layout, faults, place) for faults in (cell.faults, FaultPlan()))
    except RankError as error:
        problem = error.in_short[:_REASON_CHARACTERS]
    found = reports.new()
    fired = [firing for each in told for firing in each.fired]
    given = grade(
        cell.truths,
        unfired=unfired(cell.faults, {(firing.rank, firing.at) for firing in fired}) if told else (),
        incidents=[each.item for each in found if isinstance(each.item, Incident)],
        failures=[problem] if problem else [failure for each in (*told, *again) for failure in each.failures],
    )
    if given.passed:
        given = recovered(min(fault.steps[0] for fault in cell.faults), told, again)
    return found_in(
        cell,
        given,
        found,
        happened=min((each.monotonic for each in fired), default=None),
        took_seconds=time.monotonic() - begin,
        detail=fired[0].detail if fired else "",
    )


def _trained(layout: JobLayout, faults: FaultPlan, place: Path) -> list[RecoveryRankResult]:
    """By new processes, from what the last ones have kept."""
    return retried(
        lambda: run_ranks(
            train,
            layout.ranks,
            layout,
            faults,
            place,
            place / "kept",
            timeout=_SECONDS,
            backend=layout.backend,
        )
    )


def recovered(faulty: int, told: Sequence[RecoveryRankResult], again: Sequence[RecoveryRankResult]) -> Grade:
    """Whether the step at which corruption was found is excluded and the state before it is back, bitwise."""
    if {each.poisoned for each in told} != {faulty}:
        poisoned = sorted({str(each.poisoned) for each in told})
        return Grade(Flaw.NOT_RECOVERED, f"checkpoints are poisoned at step {poisoned}, not at {faulty}")
    steps = {each.resumed for each in again}
    if steps != {faulty - 1}:
        return Grade(Flaw.NOT_RECOVERED, f"ranks went on from step {sorted(steps)}, not from {faulty - 1}")
    for rank, (before, after) in enumerate(zip(told, again, strict=True)):
        if before.digests[faulty - 1] != after.digests[faulty - 1]:
            return Grade(Flaw.NOT_RECOVERED, f"rank {rank} has other bits than after step {faulty - 1}")
        if max(after.digests) != STEPS:
            return Grade(Flaw.NOT_RECOVERED, f"rank {rank} came to step {max(after.digests)}, not to {STEPS}")
    return Grade()
