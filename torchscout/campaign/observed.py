"""Cells that may hang: each has processes and observers of its own."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchscout.attach import enable_resiliency
from torchscout.campaign.cell import Cell, JobLayout
from torchscout.campaign.grading import Reports, grade, unfired
from torchscout.campaign.results import Result, found_in
from torchscout.campaign.training import Training
from torchscout.config import ObserverConfig
from torchscout.decision.record import Incident
from torchscout.decision.recorder import Stamped
from torchscout.faults.effects import CallEffect, Freeze, Sleep
from torchscout.faults.fault import Fault
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.session.session import Session
from torchscout.testing.local_ranks import LiveRanks, RankError

__all__ = [
    "QUICK",
    "READY",
    "TRAIN",
    "ObservedRankResult",
    "Seen",
    "be_quiet",
    "firings_of",
    "graded",
    "is_busy",
    "observe",
    "observers_of",
    "released",
    "retried",
    "run_at_once",
    "run_observed",
    "steps",
    "train",
]

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class SleepUntil(Sleep):
    """For ``seconds``, or until there is a report."""

    report: str

    def happen(self) -> None:
        deadline, report = time.monotonic() + self.seconds, Path(self.report)
        while time.monotonic() < deadline and not report.exists():
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class FreezeUntil(Freeze):
    """Stopped for ``seconds``, or until there is a report; let go by somebody else."""

    report: str

    def happen(self) -> None:
        tries = int(self.seconds / _POLL_SECONDS)
        wait = f"for i in $(seq {tries}); do [ -e '{self.report}' ] && break; sleep {_POLL_SECONDS}; done"
        subprocess.run(["sh", "-c", f"({wait}; kill -CONT {os.getpid()}) >/dev/null 2>&1 &"], check=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def released(faults: FaultPlan, report: Path) -> FaultPlan:
    """The same faults; those that only take time are over once ``report`` is there."""
    return FaultPlan(tuple(_released(fault, str(report)) for fault in faults))


def _released(fault: Fault, report: str) -> Fault:
    if type(fault.effect) is Sleep:
        return replace(fault, effect=SleepUntil(fault.effect.seconds, report))
    if type(fault.effect) is Freeze:
        return replace(fault, effect=FreezeUntil(fault.effect.seconds, report))
    return fault


STEPS = 6
QUICK = ObserverConfig(min_silence_seconds=1.0, startup_seconds=20.0, grace_seconds=3.0)
READY, TRAIN = "ready", "train"
"""What ranks are asked: to say that they have started, then to train."""
_MEETING_SECONDS = 5.0
_PAUSE_SECONDS = 0.02
"""Between steps: a job that does nothing but communicate is not what observers look at."""


_LOGGED_EVERY = 2
"""Steps."""


@dataclass(frozen=True, slots=True)
class ObservedRankResult:
    """What one rank has to tell."""

    failures: list[str]


def train(
    rank: int,
    questions: Iterator[Any],
    layout: JobLayout,
    faults: FaultPlan,
    run_dir: Path,
    observer: ObserverConfig = QUICK,
) -> Iterator[ObservedRankResult]:
    """One short training, once it is asked for."""
    be_quiet(run_dir)
    training = Training(layout)
    log = firings_of(run_dir) / f"rank-{rank}.jsonl"
    with (
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=None,
            observer=observer,
            parallelism=layout.mesh() if layout.tensor > 1 else None,
            run_dir=run_dir,
        ) as session,
        Injector(faults, rank, training.net, training.optimizer, log=log) as injector,
    ):
        if (status := session.status()["observer"]) is not None:
            (observers_of(run_dir) / str(rank)).write_text(str(status["pid"]))
            _await_hubs(session)
        for question in questions:
            if question == TRAIN:
                steps(training, session.watch_input(injector.input(training.batches())))
            yield ObservedRankResult(session.failures)


def _await_hubs(session: Session) -> None:
    """A job that hangs within a moment of its start is another story: observers have yet to meet."""
    deadline = time.monotonic() + _MEETING_SECONDS
    while not all(session.status()["observer"]["connected"]) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def steps(training: Training, batches: Iterable[torch.Tensor]) -> None:
    """A few of them, whatever happens on the way."""
    for step, tokens in zip(range(1, STEPS + 1), batches, strict=False):
        loss = training.step(step, tokens)
        if step % _LOGGED_EVERY == 0:
            loss.item()  # as a job that logs it: a CUDA host waits for its device there and nowhere else
        time.sleep(_PAUSE_SECONDS)
    if training.device.type == "cuda":
        torch.cuda.synchronize(training.device)


def be_quiet(run_dir: Path) -> None:
    """The campaign tells what was found; what Gloo has to say of mismatched collectives goes to a file."""
    logging.getLogger("torchscout").addHandler(logging.NullHandler())
    with (run_dir / "errors.log").open("a") as log:
        os.dup2(log.fileno(), 2)


def firings_of(run_dir: Path) -> Path:
    """Where ranks write down that a fault happens, before it does."""
    return run_dir / "firings"


def observers_of(run_dir: Path) -> Path:
    """Where the process numbers of observers are."""
    return run_dir / "observer-processes"


_BUSY = re.compile(r"busy or unavailable|[Ee]rror:? 80[5-8]\b|MPS (client|server)")
_TRIES, _START_PAUSE_SECONDS = 8, 3.0
_Value = TypeVar("_Value")


def is_busy(error: RankError) -> bool:
    """Whether a rank failed because the device takes no new processes now."""
    return any(_BUSY.search(failure) for failure in error.failures.values())


def retried(
    start: Callable[[], _Value], *, tries: int = _TRIES, pause_seconds: float = _START_PAUSE_SECONDS
) -> _Value:
    """What ``start`` returns; it is called again after a pause as long as the device is busy."""
    try:
        return start()
    except RankError as error:
        if tries <= 1 or not is_busy(error):
            raise
    time.sleep(pause_seconds)
    return retried(start, tries=tries - 1, pause_seconds=pause_seconds)


_START_SECONDS = 90.0
"""What CUDA ranks may take until they can train."""
_SECONDS = 40.0
"""What a cell may take; on CUDA from then on."""
_SETTLE_SECONDS = 1.0
"""How long one listens on after an incident, where the job will not go on: nothing else must be reported."""
_LEAVE_SECONDS = 5.0
"""How long a job that has come to its end, and its observers, may take to leave."""
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
    body: Callable[..., Iterator[ObservedRankResult]] = train,
    look: _Look | None = None,
) -> Seen:
    """Run the cell's job; ``stop`` ends it before its time."""
    begin = time.monotonic()
    reports, found, told, failures = (
        Reports(run_dir),
        list[Stamped](),
        list[ObservedRankResult](),
        list[str](),
    )
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
        ranks.close(timeout_seconds=_LEAVE_SECONDS if told else 0.0)
        _await_observers(run_dir)
    failures += [failure for each in told for failure in each.failures]
    return Seen([*found, *reports.new()], _fired(run_dir), failures, time.monotonic() - begin)


def _started(cell: Cell, run_dir: Path, body: Callable[..., Iterator[ObservedRankResult]]) -> LiveRanks:
    """Ranks that are about to train; on CUDA they have said that they can."""
    shutil.rmtree(run_dir, ignore_errors=True)  # of a run that was interrupted
    for each in (firings_of(run_dir), observers_of(run_dir)):
        each.mkdir(parents=True)
    layout, faults = cell.place, released(cell.faults, run_dir / "incidents.jsonl")
    with ExitStack() as undo:
        ranks = LiveRanks(body, layout.ranks, layout, faults, run_dir, backend=layout.backend)
        undo.callback(ranks.close, timeout_seconds=0.0)
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
    return bool(fired) and time.monotonic() - fired[0]["monotonic"] < QUICK.min_silence_seconds


def _end_observers(run_dir: Path) -> None:
    for number in _observers(run_dir):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _fired(run_dir: Path) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in sorted(firings_of(run_dir).iterdir())]
    return [
        json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")
    ]


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
