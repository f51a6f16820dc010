"""Runs cells that may hang: each in processes of its own, several at once, since they mostly wait."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.grading import grade
from torchscout.cli.campaign.observed import Told, firings_of, observers_of, train
from torchscout.cli.campaign.reports import Reports
from torchscout.cli.campaign.result import Result, found_in
from torchscout.cli.local_ranks import LiveRanks, RankError
from torchscout.decision.record import Incident
from torchscout.decision.recorder import Stamped
from torchscout.faults.call_effects import CallEffect

__all__ = ["run_observed"]

_SECONDS = 40.0
"""What a cell may take."""
_SETTLE_SECONDS = 1.0
"""How long one listens on after an incident, where the job will not go on: nothing else must be reported."""
_POLL_SECONDS = 0.1
_REASON_CHARACTERS = 600


def run_observed(cells: Sequence[Cell], folder: Path, jobs: int) -> Generator[Result, None, None]:
    """Results as they come; the evidence of those that fail stays in ``folder``."""
    pool, stop = ThreadPoolExecutor(jobs), threading.Event()
    try:
        futures = [pool.submit(_run, cell, folder / _file_name(cell), stop) for cell in cells]
        for future in as_completed(futures):
            yield future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _file_name(cell: Cell) -> str:
    return re.sub(r"[^\w.@-]", "_", cell.identity)


def _run(cell: Cell, run_dir: Path, stop: threading.Event) -> Result:
    begin = time.monotonic()
    shutil.rmtree(run_dir, ignore_errors=True)  # of a run that was interrupted
    for each in (firings_of(run_dir), observers_of(run_dir)):
        each.mkdir(parents=True)
    reports, told, problem = Reports(run_dir), list[Told](), ""
    ranks = LiveRanks(train, cell.place.ranks, cell.place, cell.faults, run_dir)
    try:
        ranks.tell("train")
        found = _followed(ranks, reports, stop, goes_on=_goes_on(cell))
        if _goes_on(cell) and not stop.is_set():
            told = ranks.answers(timeout=1.0)
    except RankError as error:
        problem = str(error)[:_REASON_CHARACTERS]
    finally:
        if not told:
            _end_observers(run_dir)  # first: they would report that their trainers are killed
        ranks.close(patience_seconds=5.0 if told else 0.0)
    result = _graded(cell, run_dir, [*found, *reports.new()], told, problem, time.monotonic() - begin)
    if result.grade.passed:
        shutil.rmtree(run_dir)
    return result


def _goes_on(cell: Cell) -> bool:
    """Whether the job comes to its end once the fault is over. Collectives that do not match never do."""
    return not any(isinstance(fault.effect, CallEffect) for fault in cell.faults)


def _followed(ranks: LiveRanks, reports: Reports, stop: threading.Event, *, goes_on: bool) -> list[Stamped]:
    """What is reported until the job has ended, or until nothing more is to be expected of it."""
    found: list[Stamped] = []
    deadline = time.monotonic() + _SECONDS
    while not (ranks.have_answered(_POLL_SECONDS) or stop.is_set() or time.monotonic() > deadline):
        new = reports.new()
        if new and not found and not goes_on:
            deadline = time.monotonic() + _SETTLE_SECONDS
        found += new
    return found


def _end_observers(run_dir: Path) -> None:
    for entry in observers_of(run_dir).iterdir():
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(entry.read_text()), signal.SIGKILL)


def _graded(
    cell: Cell, run_dir: Path, reports: Sequence[Stamped], told: Sequence[Told], problem: str, took: float
) -> Result:
    fired = [
        json.loads(line)
        for path in sorted(firings_of(run_dir).iterdir())
        for line in path.read_text().splitlines()
    ]
    happened = {(firing["rank"], firing["at"]) for firing in fired}
    unfired = [
        f"the fault of rank {fault.rank} at {fault.at}"
        for fault in cell.faults
        if (fault.rank, fault.at) not in happened
    ]
    failures = [failure for each in told for failure in each.failures]
    given = grade(
        cell.truths,
        unfired=unfired,
        incidents=[each.item for each in reports if isinstance(each.item, Incident)],
        failures=[problem] if problem else failures,
    )
    first = min((firing["monotonic"] for firing in fired), default=None)
    detail = fired[0]["detail"] if fired else ""
    return found_in(cell, given, reports, happened=first, took_seconds=took, detail=detail)
