"""Runs cells inside live ranks, one after another, and replaces ranks that have become of no use."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.grading import Flaw, Grade, grade, unfired
from torchscout.cli.campaign.layout import BLOCKS, Layout
from torchscout.cli.campaign.reports import Reports
from torchscout.cli.campaign.result import Result, found_in
from torchscout.cli.campaign.schedule import Slot, planned, scheduled
from torchscout.cli.campaign.starting import retried
from torchscout.cli.campaign.warm import EVERY_STEP, Stretch, Told, train
from torchscout.cli.local_ranks import LiveRanks, RankError
from torchscout.config import ReplayConfig
from torchscout.decision.record import Incident
from torchscout.faults.plan import FaultPlan

__all__ = ["Judge", "run_warm"]

_SECONDS = 120.0
"""What a cell may take, on a machine that is busy with other things."""
_REASON_CHARACTERS = 600


class Judge(Protocol):
    """Decides on the same evidence by itself."""

    def judge(self, slot: Slot, told: Sequence[Told], run_dir: Path) -> Mapping[str, str]:
        """Called after each cell of the same ranks, in order."""
        ...


def run_warm(
    cells: Sequence[Cell],
    folder: Path,
    seed: int,
    *,
    replay: ReplayConfig = EVERY_STEP,
    judge: Callable[[Layout], Judge] | None = None,
) -> Generator[Result, None, None]:
    """Cells of one layout; their evidence goes to ``folder``, and stays there for those that fail.

    ``replay`` must have a check at every step. Where there is a ``judge``, each set of ranks gets a new one.
    """
    left, run, layout = list(cells), 0, cells[0].place
    while left:
        run += 1
        results: list[Result] = []
        run_dir = folder / f"run-{run}"
        body = partial(train, replay=replay)
        for result in _run(left, run_dir, seed, body, None if judge is None else judge(layout)):
            results.append(result)
            yield result
        done = {each.cell for each in results}
        left = [cell for cell in left if cell.identity not in done]
        if all(each.grade.passed for each in results):
            shutil.rmtree(run_dir / "records", ignore_errors=True)


def _run(
    cells: Sequence[Cell],
    run_dir: Path,
    seed: int,
    body: Callable[..., Iterator[Told]],
    judge: Judge | None,
) -> Generator[Result, None, None]:
    """Until all are done, or the ranks cannot be used for the next cell."""
    slots, layout = scheduled(cells, BLOCKS), cells[0].place
    reports, begin = Reports(run_dir), time.monotonic()
    try:
        started = retried(lambda: _started(body, layout, planned(slots), run_dir, seed))
    except RankError as error:
        yield _broken(slots[0], error.in_short, time.monotonic() - begin)
        return
    with started as ranks:
        for slot in slots:
            begin = time.monotonic()
            try:
                told: list[Told] = ranks.ask(Stretch(slot.last, slot.restored_after), timeout=_SECONDS)
            except RankError as error:
                yield _broken(slot, error.in_short, time.monotonic() - begin)
                return
            result = _graded(slot, told, reports, time.monotonic() - begin)
            if judge is not None:
                result = replace(result, ablated=judge.judge(slot, told, run_dir))
            yield result
            if result.grade.flaw is Flaw.BROKEN or any(each.step == slot.last for each in result.found):
                return  # the step that should have been clean was not: the next cell would suffer from it


def _started(
    body: Callable[..., Iterator[Told]], layout: Layout, faults: FaultPlan, run_dir: Path, seed: int
) -> LiveRanks:
    """Ranks that are about to train; on CUDA they have said that they can."""
    with ExitStack() as undo:
        ranks = LiveRanks(body, layout.ranks, layout, faults, run_dir, seed, backend=layout.backend)
        undo.callback(ranks.close)
        if layout.device == "cuda":  # which may refuse new processes: then no cell has begun
            ranks.ask(Stretch(0), timeout=_SECONDS)
        undo.pop_all()
    return ranks


def _graded(slot: Slot, told: Sequence[Told], reports: Reports, took: float) -> Result:
    cell, new = slot.cell, reports.new()
    fired = [firing for each in told for firing in each.fired]
    given = grade(
        cell.truths,
        unfired=unfired(slot.faults, {(firing.rank, firing.at) for firing in fired}),
        incidents=[each.item for each in new if isinstance(each.item, Incident)],
        failures=[failure for each in told for failure in each.failures],
    )
    first = min((firing.monotonic for firing in fired), default=None)
    detail = fired[0].detail if fired else ""
    return found_in(cell, given, new, happened=first, took_seconds=took, detail=detail)


def _broken(slot: Slot, error: str, took: float) -> Result:
    reason = f"the ranks failed, and were replaced: {error[:_REASON_CHARACTERS]}"
    return found_in(slot.cell, Grade(Flaw.BROKEN, reason), [], happened=None, took_seconds=took)
