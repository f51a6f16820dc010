"""The handle that a user holds (paper, section 9): what happens at a step, a fetch, a checkpoint, the end.

A failure of SCOUT itself stops here: it is logged and counted, and training goes on.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from torchscout.decision.progress import Phase
from torchscout.decision.record import Incident
from torchscout.decision.recorder import IncidentLog
from torchscout.log import log
from torchscout.observer.monitor import HangMonitor
from torchscout.observer.record.directory import End, RankEntry
from torchscout.session.ending import closing_line, how_ended, mark_recovered
from torchscout.session.incident_callback import IncidentCallback
from torchscout.session.replay_driver import ReplayDriver

if TYPE_CHECKING:
    from torchscout.checkpoint.state.training_state import Stateful
    from torchscout.session.checkpoint_manager import CheckpointManager
    from torchscout.session.resumption import Resumption

__all__ = ["InputHook", "Session"]

_Batch = TypeVar("_Batch")


class InputHook(Generic[_Batch]):
    """The same batches, as often as one iterates over it; its attributes are the source's."""

    def __init__(self, source: Iterable[_Batch], tell: Callable[[], None]) -> None:
        self._source, self._tell = source, tell

    def __iter__(self) -> Iterator[_Batch]:
        self._tell()
        batches = iter(self._source)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            self._tell()

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is being made there is no source yet
            raise AttributeError(name)
        return getattr(self._source, name)


_VERDICT_SECONDS = 2.0
"""How long rank 0 waits for the observers when an exception ends it, so that its log says why."""


class Session:
    """What SCOUT does for one job on one rank, until ``close`` or the end of the ``with`` block."""

    def __init__(self, run_dir: Path, undo: ExitStack, rank: int = 0) -> None:
        self.step = 0
        """Training steps finished since SCOUT was attached."""
        self.run_dir, self.rank = run_dir, rank
        self.failures: list[str] = []
        """What went wrong within SCOUT itself, and is therefore not checked."""
        self.hang_monitor: HangMonitor | None = None
        self.replay_driver: ReplayDriver | None = None
        self.checkpoint_manager: CheckpointManager | None = None
        self.news: IncidentCallback | None = None
        self.entry: RankEntry | None = None
        """This rank's, in the run directory."""
        self.not_replaying = "it was not asked for"
        """Why there is no replay, where there is none."""
        self.undo = undo
        """What ``close`` takes back, last first."""
        self._pid = os.getpid()
        self._has_ended = False
        self._handled = sys.exc_info()[1]  # the program may be in an ``except`` block all along
        atexit.register(self._at_exit)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def incidents(self) -> list[Incident]:
        """Those in the run directory so far, by whichever rank; where it has none, because it cannot be
        written to or is another machine's, those of this session."""
        found = IncidentLog.read(self.run_dir).incidents
        return found or ([] if self.news is None else list(self.news.incidents))

    def status(self) -> dict[str, Any]:
        """Where this rank stands and what watches over it."""
        observer = self.guarded(self.hang_monitor.status) if self.hang_monitor else None
        replaying = self.replay_driver
        replay = self.guarded(replaying.status) if replaying else {"off": self.not_replaying}
        return {
            "step": self.step,
            "run_dir": str(self.run_dir),
            "observer": observer,
            "replay": replay,
            "checkpoint": self.guarded(self.checkpoint_manager.status) if self.checkpoint_manager else None,
            "failures": list(self.failures),
        }

    @property
    def certified_step(self) -> int | None:
        """The newest step whose state checks have certified, on every rank; None if there is none yet.

        A checkpoint that the job wrote itself can be trusted if it is of this step or an earlier one.
        """
        return None if self.replay_driver is None else self.replay_driver.trust.step

    def watch_input(self, source: Iterable[_Batch]) -> Iterable[_Batch]:
        """The same batches; that one is being fetched is published, and how long it took."""
        watched = source if self.hang_monitor is None else self.hang_monitor.publisher.watch_input(source)
        return watched if self.checkpoint_manager is None else InputHook(watched, self.step_begins)

    def checkpoint_io(self, kind: Literal["read", "write"]) -> AbstractContextManager[None]:
        """Around the reading or writing of a checkpoint: longer silence is then no hang."""
        phases = {"read": Phase.CHECKPOINT_READ, "write": Phase.CHECKPOINT_WRITE}
        if kind not in phases:
            raise ValueError(f"checkpoint_io is 'read' or 'write', got {kind!r}")
        return self._during(phases[kind])

    def evaluation(self) -> AbstractContextManager[None]:
        """Around an evaluation: longer silence is then no hang."""
        return self._during(Phase.EVALUATION)

    @contextmanager
    def pause_observer(self) -> Iterator[None]:
        """While in this block no silence is a hang: a debugger, a long export, anything."""
        if self.hang_monitor is None:
            yield
            return
        self.hang_monitor.writer.pause()
        try:
            yield
        finally:
            self.hang_monitor.writer.resume()

    def register_state(self, name: str, stateful: Stateful) -> None:
        """Let checkpoints keep this too: a scheduler, a scaler, the position of a data loader.

        It has ``state_dict`` and ``load_state_dict``; register it before ``resume``, on every rank.
        """
        self._checkpoints().register(name, stateful)

    def resume(self, *, start_over: bool = False) -> Resumption:
        """Go back to the checkpoint of an earlier run that can be trusted, if there is one.

        Call it on every rank, after ``register_state`` and before training. ``UnavailableError`` on all ranks
        if there is one and it cannot be had; with ``start_over`` the job begins again then.
        """
        if self.step:
            raise ValueError(f"call resume() before training; {self.step} steps are done")
        sweep = None if self.replay_driver is None else self.replay_driver.sweep
        resumed = self._checkpoints().resume(sweep, start_over=start_over)
        self._begin_after(resumed.step)
        self.guarded(lambda: self._note_resumption(resumed))
        return resumed

    def _note_resumption(self, resumed: Resumption) -> None:
        """Say where the job goes on from, and that corruption which earlier runs found is gone."""
        if self.rank == 0:
            log.info("resume: step %d: %s", resumed.step, resumed.reason)
            mark_recovered(Path(self._checkpoints().status()["directory"]), resumed.step)

    def start_from(self, step: int) -> None:
        """The job has loaded a checkpoint of its own: count on from the step that it holds.

        Call it on every rank, before training; beside ``resume`` only where that found nothing.
        """
        if self.step:
            raise ValueError(f"call start_from({step}) before training; {self.step} steps are done")
        self._begin_after(step)

    def _begin_after(self, step: int) -> None:
        self.step = step
        if step and self.replay_driver is not None:
            self.replay_driver.start_after(step)
        if self.hang_monitor is not None:
            self.hang_monitor.publisher.start_from(step)

    def change_observer(self, **settings: float) -> None:
        """Change fields of ``ObserverConfig`` while the job runs, on this rank."""
        if self.hang_monitor is None:
            raise ValueError("this session has no observer")
        self.hang_monitor.observer.change(**settings)

    def change_replay(self, **settings: Any) -> None:
        """Change ``interval``, ``recipes``, ``variants`` or ``budget`` of replay while the job runs.

        Rank 0's word counts, for all ranks, from the end of the next check on.
        """
        if self.replay_driver is None:
            raise ValueError("this session has no replay")
        self.replay_driver.change(**settings)

    def step_finished(self) -> None:
        """Called by the optimizer's hook, right after the update."""
        self.step += 1
        if (replaying := self.replay_driver) is not None:
            # A rank that cannot go on leaves; the others notice that it is gone, and leave too.
            self.guarded(
                lambda: replaying.step_finished(self.step),
                on_failure=lambda: self.stop_replay(self.failures[-1]),
            )

    def step_begins(self) -> None:
        """Called when a batch is asked for, or else when the model is called."""
        if self.checkpoint_manager is not None:
            self.guarded(self.checkpoint_manager.step_begins)

    def before_update(self) -> None:
        """Called by the optimizers' hooks: what the last check captured must be copied by now."""
        if self.checkpoint_manager is not None:
            self.guarded(self.checkpoint_manager.fence)
        if self.replay_driver is not None:
            self.guarded(self.replay_driver.update_begins)

    def close(self) -> None:
        """Detach: nothing of SCOUT stays on this rank. Idempotent; every rank must call it."""
        atexit.unregister(self._at_exit)
        if os.getpid() != self._pid:
            return  # a forked child: all of this is its parent's
        error = sys.exc_info()[1]
        ending = partial(self._end, self.certified_step, None if error is self._handled else error)
        self.stop_replay("the session is closed")
        checkpointing, self.checkpoint_manager = self.checkpoint_manager, None
        if checkpointing is not None:
            self.guarded(checkpointing.close)
        self.guarded(ending)
        watching, self.hang_monitor = self.hang_monitor, None
        if watching is not None:
            self.guarded(watching.close)
        self.guarded(self.undo.close)

    def failed(self, error: Exception, *, is_shared: bool = False) -> None:
        """Something of SCOUT's own did not work: say so, and let training go on.

        What ``is_shared`` by all ranks is logged by rank 0.
        """
        told = f"{type(error).__name__}: {error}"
        if told in self.failures[-4:]:  # a disk that stays full would fill the memory too
            return
        self.failures.append(told)
        if not is_shared or self.rank == 0:
            log.error(
                "rank %d: torchscout itself failed at step %d, and training is not affected",
                self.rank,
                self.step,
                exc_info=error,
            )

    def stop_replay(self, why: str) -> None:
        replaying, self.replay_driver = self.replay_driver, None
        if replaying is not None:
            self.not_replaying = f"it has stopped: {why}"
            self.guarded(replaying.close)

    def _at_exit(self) -> None:
        """A script that ends without ``close`` has finished, unless an exception or its status says not."""
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_value", None)
        if error is not None and self.news is not None and self.rank == 0:
            self.news.wait(_VERDICT_SECONDS)
        if self.checkpoint_manager is not None:
            self.guarded(self.checkpoint_manager.finish)
        self.guarded(lambda: self._end(self.certified_step, error, is_exiting=True))
        if self.hang_monitor is not None and error is None:
            self.guarded(self.hang_monitor.leave)

    def _end(self, certified: int | None, error: BaseException | None, *, is_exiting: bool = False) -> None:
        """Say how the session ended, in the log and in the run directory.

        With which status the program exits is not known yet if it ``is_exiting`` without an exception. Its
        observer will see that, and write down how it ended.
        """
        if self._has_ended:
            return
        self._has_ended = True
        how, incidents = how_ended(error), []
        is_open = is_exiting and error is None
        if self.news is not None:
            self.news.close()
            incidents = self.news.incidents
        if self.rank == 0 or how == "failed":
            level = logging.INFO if how == "finished" and not incidents else logging.WARNING
            word = "ended" if is_open else how
            log.log(
                level, "rank %d: %s", self.rank, closing_line(word, self.step, incidents, certified, error)
            )
        if (entry := self.entry) is not None and not (is_open and self.hang_monitor is not None):
            why = "" if error is None else f"{type(error).__name__}: {error}"
            End(entry.rank, how, self.step, entry.record, why).write(self.run_dir)

    def _checkpoints(self) -> CheckpointManager:
        if self.checkpoint_manager is None:
            raise ValueError("this session keeps no checkpoints; pass checkpoint=CheckpointConfig(...)")
        return self.checkpoint_manager

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        return nullcontext() if self.hang_monitor is None else self.hang_monitor.publisher.during(phase)

    def guarded(self, action: Callable[[], Any], *, on_failure: Callable[[], Any] | None = None) -> Any:
        """Run an action of SCOUT's own; its failure is logged and never propagates into training."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001  see the docstring
            self.failed(error)
        return None if on_failure is None else on_failure()
