"""Runs cells inside live ranks, one after another, and replaces ranks that have become of no use."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.grading import Flaw, Grade, grade
from torchscout.cli.campaign.layout import BLOCKS, LAYOUTS
from torchscout.cli.campaign.reports import Reports
from torchscout.cli.campaign.result import Result, found_in
from torchscout.cli.campaign.schedule import Slot, planned, scheduled
from torchscout.cli.campaign.warm import Stretch, Told, train
from torchscout.cli.local_ranks import LiveRanks, RankError
from torchscout.decision.record import Incident

__all__ = ["run_warm"]

_SECONDS = 120.0
"""What a cell may take, on a machine that is busy with other things."""
_REASON_CHARACTERS = 600


def run_warm(cells: Sequence[Cell], folder: Path, seed: int) -> Generator[Result, None, None]:
    """Cells of one layout; their evidence goes to ``folder``, and stays there for those that fail."""
    left, run = list(cells), 0
    while left:
        run += 1
        results: list[Result] = []
        run_dir = folder / f"run-{run}"
        for result in _run(left, run_dir, seed):
            results.append(result)
            yield result
        done = {each.cell for each in results}
        left = [cell for cell in left if cell.identity not in done]
        if all(each.grade.passed for each in results):
            shutil.rmtree(run_dir / "records", ignore_errors=True)


def _run(cells: Sequence[Cell], run_dir: Path, seed: int) -> Generator[Result, None, None]:
    """Until all are done, or the ranks cannot be used for the next cell."""
    slots, layout = scheduled(cells, BLOCKS), LAYOUTS[cells[0].layout]
    reports = Reports(run_dir)
    with LiveRanks(train, layout.ranks, layout, planned(slots), run_dir, seed) as ranks:
        for slot in slots:
            begin = time.monotonic()
            try:
                told: list[Told] = ranks.ask(Stretch(slot.last, slot.restored_after), timeout=_SECONDS)
            except RankError as error:
                yield _broken(slot, str(error), time.monotonic() - begin)
                return
            result = _graded(slot, told, reports, time.monotonic() - begin)
            yield result
            if result.grade.flaw is Flaw.BROKEN or any(each.step == slot.last for each in result.found):
                return  # the step that should have been clean was not: the next cell would suffer from it


def _graded(slot: Slot, told: Sequence[Told], reports: Reports, took: float) -> Result:
    cell, new = slot.cell, reports.new()
    fired = [firing for each in told for firing in each.fired]
    happened = {(firing.rank, firing.at) for firing in fired}
    unfired = [
        f"the fault of rank {fault.rank} at {fault.at}"
        for fault in slot.faults
        if (fault.rank, fault.at) not in happened
    ]
    given = grade(
        cell.truths,
        unfired=unfired,
        incidents=[each.item for each in new if isinstance(each.item, Incident)],
        failures=[failure for each in told for failure in each.failures],
    )
    first = min((firing.monotonic for firing in fired), default=None)
    detail = fired[0].detail if fired else ""
    return found_in(cell, given, new, happened=first, took_seconds=took, detail=detail)


def _broken(slot: Slot, error: str, took: float) -> Result:
    reason = f"the ranks failed, and were replaced: {error[:_REASON_CHARACTERS]}"
    return found_in(slot.cell, Grade(Flaw.BROKEN, reason), [], happened=None, took_seconds=took)
