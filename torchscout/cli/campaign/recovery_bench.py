"""Runs cells whose job is corrupted, stops, and goes on from what can be trusted (paper, section 8)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.grading import Flaw, Grade, grade, unfired
from torchscout.cli.campaign.layout import Layout
from torchscout.cli.campaign.recovery import STEPS, Told, train
from torchscout.cli.campaign.reports import Reports
from torchscout.cli.campaign.result import Result, found_in
from torchscout.cli.campaign.starting import retried
from torchscout.cli.local_ranks import RankError, run_ranks
from torchscout.decision.record import Incident
from torchscout.faults.plan import FaultPlan

__all__ = ["run_recovery"]

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
    reports, told, again = Reports(place), list[Told](), list[Told]()
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


def _trained(layout: Layout, faults: FaultPlan, place: Path) -> list[Told]:
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


def recovered(faulty: int, told: Sequence[Told], again: Sequence[Told]) -> Grade:
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
