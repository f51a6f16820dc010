"""The handle that a user holds: what happens at a step, a fetch, a checkpoint, the end (paper, section 9)."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from torchscout.config import MetricsConfig
from torchscout.decision.progress import Phase
from torchscout.decision.types import Failure, Incident, Started
from torchscout.errors import UnavailableError
from torchscout.log import log
from torchscout.observer.monitor import HangMonitor
from torchscout.run.folder import End, How, RankEntry, read_unwatched
from torchscout.run.reader import IncidentLog
from torchscout.run.writer import record_one
from torchscout.session.boundary import Boundary
from torchscout.session.ending import closing_line, failure, how_ended, mark_recovered, why_ended
from torchscout.session.incidents import Incidents
from torchscout.session.recovery import Recovery
from torchscout.session.replay.recovery import RecoveringReplay
from torchscout.session.termination import before_termination
from torchscout.utils.cuda_graphs import is_capturing

if TYPE_CHECKING:
    from torchscout.session.checkpoints.manager import CheckpointManager
    from torchscout.session.checkpoints.resumption import Resumption
    from torchscout.state.collect import Stateful

__all__ = ["InputHook", "Parts", "Session"]

_Batch = TypeVar("_Batch")


class InputHook(Generic[_Batch]):
    """Iterates over the same batches as ``source``, and has its attributes. ``before_fetch`` is called before
    each batch is fetched."""

    def __init__(self, source: Iterable[_Batch], before_fetch: Callable[[], None]) -> None:
        self._source, self._before_fetch = source, before_fetch

    def __iter__(self) -> Iterator[_Batch]:
        left = self._size()
        if left != 0:
            self._before_fetch()
        for batch in self._source:
            yield batch
            left = None if left is None else left - 1
            if left != 0:  # otherwise no batch follows, and a validation may
                self._before_fetch()

    def _size(self) -> int | None:
        try:
            return len(self)
        except TypeError:  # a stream
            return None

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy under construction has no source yet
            raise AttributeError(name)
        return getattr(self._source, name)


_IN_GRAPH = (
    "the optimizer's step is part of a CUDA graph, so that steps cannot be counted and nothing is checked; "
    "capture the passes and call optimizer.step() after each replay"
)
_VERDICT_SECONDS = 5.0
"""How long a rank that fails or is ended waits for the observers: its launcher may end them, too. They ask an
observer that does not answer again after 3 s."""
_POLL_SECONDS = 0.05
_ANNOUNCEMENT_SECONDS = 0.5
"""How long it takes until the observers of all ranks know of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a session is made of; None for a subsystem that is off."""

    run_dir: Path
    boundary: Boundary
    incidents: Incidents | None = None
    entry: RankEntry | None = None
    """This rank's entry in the run directory."""
    monitor: HangMonitor | None = None
    replay: RecoveringReplay | None = None
    replay_off: str = "replay=None"
    """Why there is no replay."""
    checkpoints: CheckpointManager | None = None
    is_training: Callable[[], bool] = lambda: True
    """Whether the model is in training mode: a batch that is fetched then begins a step."""
    recovery: Recovery | None = None
    undo: ExitStack = field(default_factory=ExitStack)
    """Closes the rest when the session ends: the monitor, SCOUT's process groups, hooks."""


class Session:
    """What SCOUT does for one job on one rank, until ``close`` or the end of the ``with`` block."""

    def __init__(self, parts: Parts) -> None:
        self.run_dir = parts.run_dir
        # Closed parts are dropped, and ``parts`` is not kept: SCOUT's process groups hold their connections
        # as long as something refers to them.
        self._boundary, self._guarded = parts.boundary, parts.boundary.guarded
        self._incidents, self._entry, self._undo = parts.incidents, parts.entry, parts.undo
        self._recovery = parts.recovery
        self._monitor, self._checkpoints = parts.monitor, parts.checkpoints
        self._is_training = parts.is_training
        self._replay, self._replay_off = parts.replay, parts.replay_off
        self._pid = os.getpid()
        self._end_once = threading.Lock()
        """Acquired once, by the thread that records how the session ended."""
        self._has_ended = threading.Event()
        self._is_verdict_due = False
        """Whether it ends before the observers have said why."""
        self.ended_by: BaseException | None = None
        """The exception by which the session was closed."""
        self._handled = sys.exc_info()[1]  # the program may already be in an ``except`` block
        self._tolerated = self._handled
        """What it was handling at the last step: it trains on in spite of that."""
        atexit.register(self._at_exit)
        self._restore_sigterm: Callable[[], None] = lambda: None
        if parts.entry is not None:
            self._restore_sigterm = before_termination(self._terminated)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def step(self) -> int:
        """Training steps that have finished, including those before a checkpoint that was loaded."""
        return self._boundary.step

    @property
    def rank(self) -> int:
        return self._boundary.rank

    @property
    def failures(self) -> list[str]:
        """Failures of SCOUT itself. What they affect is not checked; training continues."""
        return self._boundary.failures

    @property
    def incidents(self) -> list[Incident]:
        """The incidents of all ranks so far, read from the run directory. If it has none, because it cannot
        be written to or is on another machine, those that this rank has received."""
        found = IncidentLog.read(self.run_dir).incidents
        return found or ([] if self._incidents is None else list(self._incidents.known))

    def status(self) -> dict[str, Any]:
        """The state of this rank and of each subsystem; None, or ``off``, for one that is not running."""
        monitor, replay, checkpoints = self._monitor, self._replay, self._checkpoints
        return {
            "step": self.step,
            "run_dir": str(self.run_dir),
            "observer": None if monitor is None else self._guarded(monitor.status),
            "replay": {"off": self._replay_off} if replay is None else self._guarded(replay.status),
            "checkpoint": None if checkpoints is None else self._guarded(checkpoints.status),
            "failures": list(self.failures),
        }

    def metrics(self) -> dict[str, Any]:
        """The numbers that monitoring shows; None for a subsystem that is not running.

        They are cheap to read, and can be read from any thread, also while training is blocked; ``status``
        has more. Only the observer is asked, and has a second to answer.
        """
        monitor, replay, checkpoints = self._monitor, self._replay, self._checkpoints
        incidents = () if self._incidents is None else tuple(self._incidents.known)
        return {
            "step": self.step,
            "incidents": [(each.manifestation.value, each.scope.value) for each in incidents],
            "observer": None if monitor is None else self._guarded(monitor.status),
            "replay": None if replay is None else self._guarded(replay.metrics),
            "checkpoint": None if checkpoints is None else self._guarded(checkpoints.metrics),
            "failures": len(self.failures),
        }

    def leave_metrics(self, config: MetricsConfig, labels: Mapping[str, str]) -> None:
        """Have the observer pass on the last values if this process dies."""
        if self._monitor is not None and (config.textfile is not None or config.otlp is not None):
            fields = asdict(
                replace(config, textfile=config.textfile and str(Path(config.textfile).absolute()))
            )
            self._monitor.observer.leave_metrics({"config": fields, "labels": dict(labels)})

    def before_close(self, action: Callable[[], None]) -> None:
        """Call this when the session is closed, before its parts are."""
        self._undo.callback(action)

    @property
    def certified_step(self) -> int | None:
        """The newest step whose state checks have certified, on every rank; None if there is none yet.

        A checkpoint that the job wrote itself can be trusted if it is of this step or an earlier one.
        """
        return None if self._replay is None else self._replay.driver.certified_step

    def watch_input(self, source: Iterable[_Batch]) -> Iterable[_Batch]:
        """Return an iterable over the same batches that publishes when a batch is being fetched, and for how
        long."""
        watched = source if self._monitor is None else self._monitor.publisher.watch_input(source)
        return watched if self._checkpoints is None else InputHook(watched, self._fetch_begins)

    def checkpoint_io(self, kind: Literal["read", "write"]) -> AbstractContextManager[None]:
        """A context in which a checkpoint is read or written: longer silence is not a hang."""
        phases = {"read": Phase.CHECKPOINT_READ, "write": Phase.CHECKPOINT_WRITE}
        if kind not in phases:
            raise ValueError(f"checkpoint_io is 'read' or 'write', got {kind!r}")
        return self._during(phases[kind])

    def evaluation(self) -> AbstractContextManager[None]:
        """A context in which the model is evaluated: longer silence is not a hang."""
        return self._during(Phase.EVALUATION)

    @contextmanager
    def pause_observer(self) -> Iterator[None]:
        """A context in which no silence is a hang: a debugger, a long export."""
        if self._monitor is None:
            yield
            return
        self._monitor.writer.pause()
        try:
            yield
        finally:
            self._monitor.writer.resume()

    def register_state(self, name: str, stateful: Stateful) -> None:
        """Add an object to checkpoints: a scheduler, a scaler, the position of a data loader.

        It has ``state_dict`` and ``load_state_dict``. Register it before ``resume``, on every rank. What has
        the position in the data must have ``__iter__``, unless batches are fetched with ``watch_input``:
        anything else is recorded when the next step is seen to begin, which may be after its batch was drawn.
        """
        self._manager().register(name, stateful)

    def resume(self, *, start_over: bool = False, layout: Literal["reshard"] | None = None) -> Resumption:
        """Load the newest checkpoint of an earlier run that can be trusted, if there is one. If that run was
        ended for a restart, its restart plan says which failure the checkpoint must predate.

        Call it on every rank, after ``register_state`` and before training. Raises ``UnavailableError`` on
        all ranks if there are checkpoints but none can be loaded; with ``start_over`` the job then starts
        from step 0. With ``layout="reshard"`` the checkpoint may be one of another number of ranks or another
        layout; ``Resumption.not_restored`` says what only the ranks that saved it could load.
        """
        if layout not in (None, "reshard"):
            raise ValueError(f"layout must be 'reshard' or None, got {layout!r}")
        if self.step:
            raise ValueError(f"call resume() before training; {self.step} steps are done")
        sweep = None if self._replay is None else self._replay.driver.sweep
        failure = Failure.OTHER if self._recovery is None else self._recovery.plan.failure
        try:
            resumed = self._manager().resume(
                sweep, start_over=start_over, failure=failure, reshard=layout is not None
            )
        except UnavailableError as error:  # on all ranks alike
            if self._recovery is not None:
                self._guarded(partial(self._recovery.nothing_to_resume, error.reason))
            raise
        if self._recovery is not None:
            self._guarded(self._recovery.plan_was_used)
        self._start_after(resumed.step)
        self._guarded(lambda: self._note_resumption(resumed))
        return resumed

    def start_from(self, step: int) -> None:
        """Continue to count from ``step``, whose checkpoint the job has loaded itself.

        Call it on every rank, before training; after ``resume`` only if that found nothing.
        """
        if self.step:
            raise ValueError(f"call start_from({step}) before training; {self.step} steps are done")
        self._start_after(step)

    def change_observer(self, **settings: float) -> None:
        """Change fields of ``ObserverConfig`` while the job runs, on this rank."""
        if self._monitor is None:
            raise ValueError("this session has no observer")
        self._monitor.observer.change(**settings)

    def _fetch_begins(self) -> None:
        if self._is_training():  # a validation between two steps belongs to the first
            self.step_begins()

    def step_begins(self) -> None:
        """Called before a batch is fetched, or else before the model is called."""
        if self._checkpoints is not None:
            self._guarded(self._checkpoints.step_begins)

    def before_update(self) -> None:
        """Called by the optimizer's hook, right before the update."""
        if is_capturing():  # replays of the graph do not call it
            return
        if self._monitor is not None:
            self._monitor.publisher.update_begins()
        if self._checkpoints is not None:  # what the last check captured must have been copied by now
            self._guarded(self._checkpoints.fence)
        if self._replay is not None:
            self._replay.update_begins()

    def step_finished(self) -> None:
        """Called by the optimizer's hook, right after the update."""
        if is_capturing():
            log.warning("%s", _IN_GRAPH)
            return
        self._boundary.step += 1
        self._tolerated = sys.exc_info()[1]
        if self._monitor is not None:
            self._monitor.publisher.step_finished(self.step)
        if self._replay is not None:
            self._replay.step_finished(self.step)

    def close(self) -> None:
        """Detach: remove all hooks, threads and processes of this rank. Idempotent. Every rank calls it."""
        atexit.unregister(self._at_exit)
        if os.getpid() != self._pid:
            return  # a forked child: all of this belongs to its parent
        error, certified = sys.exc_info()[1], self.certified_step
        self._stop_replay("the session is closed")
        if self._checkpoints is not None:
            self._guarded(self._checkpoints.finish)
        self.ended_by = error = None if error is self._handled else error
        self._end(how_ended(error), why_ended(error), certified)
        self._restore_sigterm()
        self._guarded(self._undo.close)
        self._monitor = self._checkpoints = self._recovery = None

    def give_way(self) -> None:
        """Detach without recording an end: another session of the same job follows."""
        self._end_once.acquire(blocking=False)
        self._has_ended.set()
        self.close()

    def _start_after(self, step: int) -> None:
        self._boundary.step = step
        if step and self._replay is not None:
            self._replay.driver.start_after(step)
        if self._monitor is not None:
            self._monitor.publisher.start_from(step)

    def _note_resumption(self, resumed: Resumption) -> None:
        """Log where the job continues, and mark the corruption that earlier runs found as recovered from."""
        if self.rank == 0:
            log.info("resume: step %d: %s", resumed.step, resumed.reason)
            record_one(self.run_dir, self.rank, Started(step=resumed.step, sentence=resumed.reason))
            for each in mark_recovered(Path(self._manager().status()["directory"]), resumed.step):
                if self._incidents is not None:
                    self._incidents.resolved(each)

    def _stop_replay(self, why: str) -> None:
        replay, self._replay = self._replay, None
        if replay is not None:
            self._replay_off = replay.off or f"it has stopped: {why}"
            self._guarded(replay.close)

    def _at_exit(self) -> None:
        """End a session that the script did not close. It has finished, unless there was an exception or the
        exit status says otherwise."""
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)

        def last() -> None:
            if how_ended(error) == "failed":
                self._announce_failure()
            if error is not None:
                self._guarded(self._wait_for_verdict)
            if self._checkpoints is not None:
                self._checkpoints.finish()

        is_open = error is None
        self._end(how_ended(error), why_ended(error), self.certified_step, is_open=is_open, last=last)
        if self._monitor is not None and error is None:
            self._guarded(self._monitor.leave)
        self._restore_sigterm()  # the thread that waits for it ends before the interpreter does

    def _terminated(self) -> None:
        """Called in a thread when SIGTERM arrives, before it ends the process; training continues meanwhile.

        Records first how the job ended: it may be killed while checkpoints are written. An exception may be
        ending the program already, because of which the launcher ends all ranks.
        """
        checkpoints, error = self._checkpoints, failure(self._tolerated)

        def last() -> None:
            if error is not None:
                self._announce_failure()
            elif self._monitor is not None:
                self._monitor.announce_end(has_failed=False)
            if checkpoints is not None:
                self._guarded(checkpoints.flush)
            self._wait_for_verdict()

        why = "SIGTERM" if error is None else why_ended(error)
        self._end("interrupted" if error is None else "failed", why, self.certified_step, last=last)

    def _announce_failure(self) -> None:
        if self._monitor is not None:
            if self._recovery is not None:
                self._guarded(self._recovery.fails)
            self._monitor.announce_end(has_failed=True)

    def _wait_for_verdict(self) -> None:
        """Wait shortly if the observers are about to say why the job ends."""
        began, was_due = time.monotonic(), False
        while self._monitor is not None and time.monotonic() - began < _VERDICT_SECONDS:
            is_due = bool(self._monitor.status().get("verdict_due"))
            if not is_due and (was_due or time.monotonic() - began > _ANNOUNCEMENT_SECONDS):
                return
            was_due |= is_due
            time.sleep(_POLL_SECONDS)
        self._is_verdict_due = was_due

    def _end(
        self,
        how: How,
        why: str,
        certified: int | None,
        *,
        is_open: bool = False,
        last: Callable[[], object] = lambda: None,
    ) -> None:
        """Write how the session ended to the run directory, do the ``last`` things, and log the last line.

        ``is_open`` if the interpreter exits and the exit status is not known yet; the observer will see that
        and record how the program ended.
        """
        if not self._end_once.acquire(blocking=False):
            self._has_ended.wait(_VERDICT_SECONDS)  # both by an exception and by SIGTERM
            return
        entry = self._entry
        if entry is not None and not (is_open and self._monitor is not None):
            end = End(entry.rank, how, self.step, entry.record, why)
            self._guarded(lambda: end.write(self.run_dir))
        self._guarded(last)
        self._guarded(lambda: self._log_end("ended" if is_open else how, why, certified))
        self._has_ended.set()

    def _log_end(self, how: str, why: str, certified: int | None) -> None:
        incidents = list[Incident]()
        if self._incidents is not None:
            self._incidents.close()
            incidents = self._incidents.known
        unwatched = [self.rank] if self._monitor is not None and self._monitor.is_lost else []
        if self.rank == 0:
            unwatched = sorted({*unwatched, *(self._guarded(lambda: read_unwatched(self.run_dir)) or ())})
        if self.rank == 0 or how == "failed" or unwatched:
            is_quiet = how in ("finished", "ended") and not incidents and not unwatched
            is_due = self._is_verdict_due
            line = closing_line(
                how, self.step, incidents, certified, why, unwatched=unwatched, is_verdict_due=is_due
            )
            log.log(logging.INFO if is_quiet else logging.WARNING, "%s", line)

    def _manager(self) -> CheckpointManager:
        if self._checkpoints is None:
            raise ValueError("this session keeps no checkpoints; pass checkpoint=CheckpointConfig(...)")
        return self._checkpoints

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        return nullcontext() if self._monitor is None else self._monitor.publisher.during(phase)
