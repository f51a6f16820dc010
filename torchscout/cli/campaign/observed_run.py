"""One run of a job that may hang, followed from outside until it ends or nothing more is to be expected."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.observed import QUICK, READY, TRAIN, Told, firings_of, observers_of, train
from torchscout.cli.campaign.release import released
from torchscout.cli.campaign.reports import Reports
from torchscout.cli.campaign.starting import retried
from torchscout.cli.local_ranks import LiveRanks, RankError
from torchscout.decision.record import Incident
from torchscout.decision.recorder import Stamped
from torchscout.faults.effects import CallEffect

__all__ = ["Seen", "observe"]

_START_SECONDS = 90.0
"""What CUDA ranks may take until they can train."""
_SECONDS = 40.0
"""What a cell may take; on CUDA from then on."""
_SETTLE_SECONDS = 1.0
"""How long one listens on after an incident, where the job will not go on: nothing else must be reported."""
_LEAVE_SECONDS = 5.0
"""How long a job that has come to its end, and its observers, may take to leave."""
_POLL_SECONDS = 0.1
_PROBLEM_CHARACTERS = 600

_Look = Callable[[Path], None]
"""Called with the run directory, again and again, from the fault until observers may begin to ask: to be
asked for its stacks may end a rank's stall."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of it."""

    reports: Sequence[Stamped]
    fired: Sequence[Mapping[str, Any]]
    """Every fault that happened, as ``Firing`` has it."""
    failures: Sequence[str]
    """What went wrong besides: ranks that failed, or SCOUT itself."""
    took_seconds: float
    has_started: bool = True
    """Whether the ranks came as far as to train."""

    @property
    def incidents(self) -> list[Incident]:
        return [each.item for each in self.reports if isinstance(each.item, Incident)]

    @property
    def happened(self) -> float | None:
        """When the first fault did."""
        return min((firing["monotonic"] for firing in self.fired), default=None)


def observe(
    cell: Cell,
    run_dir: Path,
    stop: threading.Event,
    *,
    body: Callable[..., Iterator[Told]] = train,
    look: _Look | None = None,
) -> Seen:
    """Run the cell's job; ``stop`` ends it before its time."""
    begin = time.monotonic()
    reports, found, told, failures = Reports(run_dir), list[Stamped](), list[Told](), list[str]()
    try:
        ranks = retried(lambda: _started(cell, run_dir, body))
    except RankError as error:
        failed = f"the ranks did not start: {error.in_short[:_PROBLEM_CHARACTERS]}"
        return Seen([], [], [failed], time.monotonic() - begin, has_started=False)
    try:
        ranks.tell(TRAIN)
        found = _followed(ranks, reports, stop, run_dir, goes_on=_goes_on(cell), look=look)
        if _goes_on(cell) and not stop.is_set():
            told = ranks.answers(timeout=1.0)
    except RankError as error:
        failures = [error.in_short[:_PROBLEM_CHARACTERS]]
    finally:
        if not told:
            _end_observers(run_dir)  # first: they would report that their trainers are killed
        ranks.close(patience_seconds=_LEAVE_SECONDS if told else 0.0)
        _await_observers(run_dir)
    failures += [failure for each in told for failure in each.failures]
    return Seen([*found, *reports.new()], _fired(run_dir), failures, time.monotonic() - begin)


def _started(cell: Cell, run_dir: Path, body: Callable[..., Iterator[Told]]) -> LiveRanks:
    """Ranks that are about to train; on CUDA they have said that they can."""
    shutil.rmtree(run_dir, ignore_errors=True)  # of a run that was interrupted
    for each in (firings_of(run_dir), observers_of(run_dir)):
        each.mkdir(parents=True)
    layout, faults = cell.place, released(cell.faults, run_dir / "incidents.jsonl")
    with ExitStack() as undo:
        ranks = LiveRanks(body, layout.ranks, layout, faults, run_dir, backend=layout.backend)
        undo.callback(ranks.close, patience_seconds=0.0)
        undo.callback(_end_observers, run_dir)  # first: they would report that their trainers are killed
        if layout.device == "cuda":  # which may refuse new processes: then the cell has not begun
            ranks.ask(READY, timeout=_START_SECONDS)
        undo.pop_all()
    return ranks


def _goes_on(cell: Cell) -> bool:
    """Whether the job comes to its end once the fault is over. Collectives that do not match never do."""
    return not any(isinstance(fault.effect, CallEffect) for fault in cell.faults)


def _followed(
    ranks: LiveRanks,
    reports: Reports,
    stop: threading.Event,
    run_dir: Path,
    *,
    goes_on: bool,
    look: _Look | None,
) -> list[Stamped]:
    """What is reported until the job has ended, or until nothing more is to be expected of it."""
    found: list[Stamped] = []
    deadline = time.monotonic() + _SECONDS
    while not (ranks.have_answered(_POLL_SECONDS) or stop.is_set() or time.monotonic() > deadline):
        new = reports.new()
        if new and not found and not goes_on:
            deadline = time.monotonic() + _SETTLE_SECONDS
        found += new
        if look is not None and _is_undisturbed(run_dir):
            look(run_dir)
    return found


def _await_observers(run_dir: Path) -> None:
    """A round may outlast the hang that it is about."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while _observers(run_dir) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _observers(run_dir: Path) -> list[int]:
    """Those that are there."""
    numbers = [int(entry.read_text() or 0) for entry in observers_of(run_dir).iterdir()]
    return [number for number in numbers if number and _is_alive(number)]


def _is_alive(number: int) -> bool:
    with suppress(OSError):
        return b") Z " not in Path(f"/proc/{number}/stat").read_bytes()
    return False


def _is_undisturbed(run_dir: Path) -> bool:
    fired = _fired(run_dir)
    return bool(fired) and time.monotonic() - fired[0]["monotonic"] < QUICK.floor_seconds


def _end_observers(run_dir: Path) -> None:
    for number in _observers(run_dir):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _fired(run_dir: Path) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in sorted(firings_of(run_dir).iterdir())]
    return [
        json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")
    ]
