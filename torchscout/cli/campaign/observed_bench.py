"""Runs cells that may hang: each in processes of its own, several at once, since they mostly wait."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.grading import grade, unfired
from torchscout.cli.campaign.observed_run import Seen, observe
from torchscout.cli.campaign.result import Result, found_in

__all__ = ["graded", "run_at_once", "run_observed"]

_Run = Callable[[Cell, Path, threading.Event], Result]


def run_observed(cells: Sequence[Cell], folder: Path, jobs: int) -> Generator[Result, None, None]:
    """Results as they come; the evidence of those that fail stays in ``folder``."""
    yield from run_at_once(_run, cells, folder, jobs)


def run_at_once(run: _Run, cells: Sequence[Cell], folder: Path, jobs: int) -> Generator[Result, None, None]:
    """``run`` has a folder of its own for each cell, and ends soon once its event is set."""
    pool, stop = ThreadPoolExecutor(jobs), threading.Event()
    try:
        futures = [pool.submit(run, cell, folder / _file_name(cell), stop) for cell in cells]
        for future in as_completed(futures):
            yield future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def graded(cell: Cell, seen: Seen) -> Result:
    happened = [(firing["rank"], firing["at"]) for firing in seen.fired]
    given = grade(
        cell.truths,
        unfired=unfired(cell.faults, happened) if seen.has_started else (),
        incidents=seen.incidents,
        failures=seen.failures,
    )
    return found_in(
        cell,
        given,
        seen.reports,
        happened=seen.happened,
        took_seconds=seen.took_seconds,
        detail=seen.fired[0]["detail"] if seen.fired else "",
    )


def _run(cell: Cell, run_dir: Path, stop: threading.Event) -> Result:
    result = graded(cell, observe(cell, run_dir, stop))
    if result.grade.passed:
        shutil.rmtree(run_dir)
    return result


def _file_name(cell: Cell) -> str:
    return re.sub(r"[^\w.@-]", "_", cell.identity)
