"""Cells that may hang: each has its own processes and observers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchscout.attach import enable_resiliency
from torchscout.campaign.cells.cell import Cell, JobLayout
from torchscout.campaign.cells.training import retried, silence_log, training_of
from torchscout.campaign.grading import unfired
from torchscout.campaign.results import Result, graded
from torchscout.config import ObserverConfig
from torchscout.decision.types import Incident
from torchscout.faults.effects import CallEffect, Freeze, Sleep
from torchscout.faults.injector import Firing, Injector
from torchscout.faults.plan import FaultPlan
from torchscout.run.reader import IncidentLog, Stamped
from torchscout.session.session import Session
from torchscout.testing.local_ranks import LiveRanks, RankError
from torchscout.testing.transformer import Training
from torchscout.utils.procfs import is_running

__all__ = [
    "QUICK",
    "TRAIN",
    "ObservedRankResult",
    "Seen",
    "firings_of",
    "observe",
    "redirect_output",
    "released",
    "run_concurrently",
    "run_observed",
    "steps",
    "train",
]

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class SleepUntil(Sleep):
    """Sleep for ``seconds``, or until ``report`` exists."""

    report: str

    def happen(self) -> None:
        deadline, report = time.monotonic() + self.seconds, Path(self.report)
        while time.monotonic() < deadline and not report.exists():
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class FreezeUntil(Freeze):
    """Stop for ``seconds``, or until ``report`` exists; another process sends the signal to continue."""

    report: str

    def happen(self) -> None:
        tries = int(self.seconds / _POLL_SECONDS)
        wait = f"for i in $(seq {tries}); do [ -e '{self.report}' ] && break; sleep {_POLL_SECONDS}; done"
        subprocess.run(["sh", "-c", f"({wait}; kill -CONT {os.getpid()}) >/dev/null 2>&1 &"], check=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def released(faults: FaultPlan, report: Path) -> FaultPlan:
    """The same faults, except that those that only take time end as soon as ``report`` exists."""
    until = {Sleep: SleepUntil, Freeze: FreezeUntil}
    return FaultPlan(
        tuple(
            replace(fault, effect=until[kind](fault.effect.seconds, str(report)))  # type: ignore[union-attr]
            if (kind := type(fault.effect)) in until
            else fault
            for fault in faults
        )
    )


STEPS = 6
QUICK = ObserverConfig(min_silence_seconds=1.0, startup_seconds=20.0, grace_seconds=3.0)
READY, TRAIN = "ready", "train"
"""Requests to ranks: answer once started, then train."""
_CONNECT_SECONDS = 5.0
_PAUSE_SECONDS = 0.02
"""Between steps: a job that does nothing but communicate is not realistic."""
_LOG_INTERVAL = 2
"""In steps."""


@dataclass(frozen=True, slots=True)
class ObservedRankResult:
    """What one rank returns."""

    failures: list[str]


def train(
    rank: int,
    requests: Iterator[Any],
    layout: JobLayout,
    faults: FaultPlan,
    run_dir: Path,
    observer: ObserverConfig = QUICK,
) -> Iterator[ObservedRankResult]:
    """Train for a few steps on request."""
    redirect_output(run_dir)
    training = training_of(layout)
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
            (_observers_in(run_dir) / str(rank)).write_text(str(status["pid"]))
            _await_hubs(session)
        for request in requests:
            if request == TRAIN:
                steps(training, session.watch_input(injector.input(training.batches())))
            yield ObservedRankResult(session.failures)


def _await_hubs(session: Session) -> None:
    """Wait until the observer is connected: hangs at the very start of a job are not part of these cells."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while not all(session.status()["observer"]["connected"]) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def steps(training: Training, batches: Iterable[torch.Tensor]) -> None:
    """Train for ``STEPS`` steps."""
    for step, tokens in zip(range(1, STEPS + 1), batches, strict=False):
        loss = training.step(step, tokens)
        if step % _LOG_INTERVAL == 0:
            loss.item()  # as when logging: only here does a CUDA host wait for its device
        time.sleep(_PAUSE_SECONDS)
    if training.device.type == "cuda":
        torch.cuda.synchronize(training.device)


def redirect_output(run_dir: Path) -> None:
    """Send standard error, such as Gloo's messages about mismatched collectives, to a file."""
    silence_log()
    with (run_dir / "errors.log").open("a") as log:
        os.dup2(log.fileno(), 2)


def firings_of(run_dir: Path) -> Path:
    """The folder in which ranks record each fault before it happens."""
    return run_dir / "firings"


def _observers_in(run_dir: Path) -> Path:
    """The folder with the process numbers of observers."""
    return run_dir / "observer-processes"


_START_SECONDS = 90.0
"""The time in which ranks must be ready to train."""
_SECONDS = 40.0
"""The time limit of a cell, from when its ranks are ready."""
_SETTLE_SECONDS = 1.0
"""How long to wait for further incidents after the first one, in a job that cannot continue."""
_EXIT_SECONDS = 5.0
"""How long a job that has ended, and its observers, may take to exit."""

_Look = Callable[[Path], None]
"""Called repeatedly with the run directory, from the fault until observers may ask for stacks, since that
may end a rank's stall."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was observed of a cell's job."""

    reports: Sequence[Stamped]
    fired: Sequence[Firing]
    failures: Sequence[str]
    """Failures of ranks, or of SCOUT itself."""
    took_seconds: float
    has_started: bool = True
    """Whether the ranks were ready to train."""

    @property
    def incidents(self) -> list[Incident]:
        return [each.item for each in self.reports if isinstance(each.item, Incident)]

    def grade(self, cell: Cell) -> Result:
        happened = [(firing.rank, firing.at) for firing in self.fired]
        missing = unfired(cell.faults, happened) if self.has_started else ()
        return graded(
            cell, self.reports, self.fired, self.took_seconds, unfired=missing, failures=self.failures
        )


def observe(
    cell: Cell,
    run_dir: Path,
    stop: threading.Event,
    *,
    body: Callable[..., Iterator[ObservedRankResult]] = train,
    look: _Look | None = None,
) -> Seen:
    """Run the cell's job; setting ``stop`` ends it early."""
    begin, reports, found = time.monotonic(), IncidentLog(run_dir), list[Stamped]()
    answers, failures = list[ObservedRankResult](), list[str]()
    try:
        ranks = retried(lambda: _started(cell, run_dir, body))
    except RankError as error:
        failed = f"the ranks did not start: {error.in_short}"
        return Seen([], [], [failed], time.monotonic() - begin, has_started=False)
    try:
        ranks.send(TRAIN)
        found = _followed(ranks, reports, stop, run_dir, continues=_continues(cell), look=look)
        if _continues(cell) and not stop.is_set():
            answers = ranks.answers(timeout=1.0)
    except RankError as error:
        failures = [error.in_short]
    finally:
        if not answers:
            _end_observers(run_dir)  # first: they would report that their trainers are killed
        ranks.close(timeout_seconds=_EXIT_SECONDS if answers else 0.0)
        _await_observers(run_dir)
    failures += [failure for each in answers for failure in each.failures]
    return Seen([*found, *reports.new()], _fired(run_dir), failures, time.monotonic() - begin)


def _started(cell: Cell, run_dir: Path, body: Callable[..., Iterator[ObservedRankResult]]) -> LiveRanks:
    """Start the ranks and wait until they are ready. A busy CUDA device refuses new processes; the caller
    tries again then."""
    shutil.rmtree(run_dir, ignore_errors=True)  # left by an interrupted run
    for each in (firings_of(run_dir), _observers_in(run_dir)):
        each.mkdir(parents=True)
    layout, faults = cell.place, released(cell.faults, run_dir / "incidents")
    with ExitStack() as undo:
        ranks = LiveRanks(body, layout.ranks, layout, faults, run_dir, backend=layout.backend)
        undo.callback(ranks.close, timeout_seconds=0.0)
        undo.callback(_end_observers, run_dir)  # first: they would report that their trainers are killed
        ranks.ask(READY, timeout=_START_SECONDS)
        undo.pop_all()
    return ranks


def _continues(cell: Cell) -> bool:
    """Whether the job continues once the fault is over. Mismatched collectives never complete."""
    return not any(isinstance(fault.effect, CallEffect) for fault in cell.faults)


def _followed(
    ranks: LiveRanks,
    reports: IncidentLog,
    stop: threading.Event,
    run_dir: Path,
    *,
    continues: bool,
    look: _Look | None,
) -> list[Stamped]:
    """What is reported until the job has ended, or until nothing more can be expected."""
    found: list[Stamped] = []
    deadline = time.monotonic() + _SECONDS
    while not (ranks.have_answered(_POLL_SECONDS) or stop.is_set() or time.monotonic() > deadline):
        new = reports.new()
        if new and not found and not continues:
            deadline = time.monotonic() + _SETTLE_SECONDS
        found += new
        if look is not None and _is_undisturbed(run_dir):
            look(run_dir)
    return found


def _await_observers(run_dir: Path) -> None:
    """Wait for observers: a round may outlast the hang that caused it."""
    deadline = time.monotonic() + _EXIT_SECONDS
    while _observers(run_dir) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _observers(run_dir: Path) -> list[int]:
    """The process numbers of observers that are alive."""
    numbers = [int(entry.read_text() or 0) for entry in _observers_in(run_dir).iterdir()]
    return [number for number in numbers if number and is_running(number)]


def _is_undisturbed(run_dir: Path) -> bool:
    fired = _fired(run_dir)
    return bool(fired) and time.monotonic() - fired[0].monotonic < QUICK.min_silence_seconds


def _end_observers(run_dir: Path) -> None:
    for number in _observers(run_dir):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _fired(run_dir: Path) -> list[Firing]:
    texts = [path.read_text() for path in sorted(firings_of(run_dir).iterdir())]
    lines = [line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Firing(**json.loads(line)) for line in lines]


_Run = Callable[[Cell, Path, threading.Event], Result]


def run_observed(cells: Sequence[Cell], folder: Path, jobs: int) -> Generator[Result, None, None]:
    """Yield results as they come; the evidence of cells that fail stays in ``folder``."""
    yield from run_concurrently(_run, cells, folder, jobs)


def run_concurrently(
    run: _Run, cells: Sequence[Cell], folder: Path, jobs: int
) -> Generator[Result, None, None]:
    """Call ``run`` for ``jobs`` cells at a time, each with its own folder; setting its event must end it."""
    pool, stop = ThreadPoolExecutor(jobs), threading.Event()
    try:
        folders = [folder / re.sub(r"[^\w.@-]", "_", cell.identity) for cell in cells]
        futures = [pool.submit(run, *each, stop) for each in zip(cells, folders, strict=True)]
        for future in as_completed(futures):
            yield future.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _run(cell: Cell, run_dir: Path, stop: threading.Event) -> Result:
    result = observe(cell, run_dir, stop).grade(cell)
    if result.grade.passed:
        shutil.rmtree(run_dir)
    return result
