"""A trainer as its observer sees it: its progress, its process, its stacks (paper, section 7). Linux only."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torchscout.config import ObserverConfig
from torchscout.decision.progress import CommGroup, Phase, Process, Progress, RankStatus
from torchscout.errors import TornRecordError
from torchscout.evidence.observer import stacks
from torchscout.evidence.observer.ends import How
from torchscout.evidence.observer.post import Post
from torchscout.evidence.observer.progress_reader import ProgressReader
from torchscout.evidence.observer.survey import SAMPLES, typical_seconds
from torchscout.evidence.observer.watch import allowance

__all__ = ["Ending", "Trainer"]

_STACK_CHARACTERS = 8192
_ASKED = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
_STALL_SECONDS = 1.0
_WATCHDOG_SECONDS = 60.0
"""A watchdog that decides to end a trainer may take so long: that of NCCL writes dumps first. Meanwhile the
one who was waited for may have come, and the job gone on for a while."""
_PRESSED, _TIMED_OUT = 0.85, 0.95
"""Of a timeout, how much a trainer has waited when the others are asked, and when it counts as over. It is
looked at now and then only, and a watchdog acts at once."""
_KILL_SECONDS = 10.0
"""The same for SIGKILL, which no watchdog of ours, NCCL's or Gloo's sends."""


class Ending(Enum):
    """How a trainer came to its end."""

    FINISHED = "finished"
    """On purpose: it said so, or its interpreter ended and exited with status 0."""
    LEFT = "left"
    """With status 0, and without a word: ``os._exit(0)``. Many jobs end like that, on all ranks. A rank that
    does so alone makes the others fail, and was the first to go."""
    ASKED = "asked"
    """Somebody sent it SIGTERM, SIGINT or SIGHUP: most often the whole job is being ended."""
    FAILED = "failed"
    """Any other way, or nobody can tell."""


@dataclass(slots=True)
class _Stall:
    """A trainer that has stood still for a while.

    What it shows when a watchdog has ended it is not what it waited for: the watchdog may abort communicators
    first, or the one who was waited for has come by then.
    """

    progress: Progress
    since: float
    until: float = 0.0
    """When it was last seen standing still."""


class Trainer:
    """What was seen at the last ``look``. The trainer is never waited for, but for its stacks, a moment."""

    def __init__(self, record: Path, stack: Path | None) -> None:
        self.reader = ProgressReader(record)
        self.progress: Progress | None = None
        """Where it stands; its operations are read for a post only."""
        self.ending: Ending | None = None
        """None as long as it has not ended."""
        self._stack = stack
        self._gone_since: float | None = None  # and had not finished
        self._status: int | None = None  # with which its process exited, where that is known
        self._stall: _Stall | None = None
        self.is_pressed = False
        """Whether it has waited for most of the time that the library allows an operation."""
        self._timed_out_at = -math.inf
        self.pidfd = self._open_pidfd()
        """Readable once the process has ended; None where the kernel has no such thing."""

    @property
    def rank(self) -> int:
        return self.reader.rank

    def look(self, now: float) -> None:
        self.progress = self.reader.glance(now) or self.progress
        if self.ending is not None:
            return
        self._note_stall(now)
        self._note_timeout(now)
        if self.reader.has_finished:
            self.ending = Ending.FINISHED
        elif self.reader.trainer() is Process.GONE:
            self._status = _exit_status(self.reader.pid)
            self.ending = _ending_of(self._status, is_exiting=self.reader.is_exiting)
            self._gone_since = None if self.ending is Ending.FINISHED else now

    @property
    def _was_killed(self) -> bool:
        return self._status is not None and self._status & 0x7F == signal.SIGKILL

    def how(self, ending: Ending) -> How:
        """The same in the words that a run directory has for it."""
        if ending is Ending.FAILED:
            return "failed" if self._status is not None and not self._status & 0x7F else "killed"
        return "interrupted" if ending is Ending.ASKED else "finished"

    def dismiss(self) -> None:
        """It wants to be watched no longer, which is as good as finished."""
        self.ending = self.ending or Ending.FINISHED

    def post(self, config: ObserverConfig, silent_seconds: float, now: float) -> Post:
        """What to say in a round, but for the stacks."""
        if self.ending is not None:
            standing = self._last_standing()
            return Post(
                standing,
                self._lines(),
                gone_seconds=None if self._gone_since is None else now - self._gone_since,
                was_killed=self._was_killed,
                stalled=self._stalled(config, now if self._gone_since is None else self._gone_since),
                has_timed_out=self._has_timed_out(now if self._gone_since is None else self._gone_since),
                operations=self._operations(standing),
            )
        standing = RankStatus(self.rank, self.reader.trainer(), self._read())
        return Post(
            standing,
            self._lines(),
            operations=self._operations(standing),
            moving=silent_seconds < config.floor_seconds / 2,
            excused=self._is_excused(config, silent_seconds),
            stalled=self._stalled(config, now),
            is_pressed=self.is_pressed,
            has_timed_out=self._has_timed_out(now),
            phase_seconds=typical_seconds(self.phase_seconds()),
        )

    def phase_seconds(self) -> dict[Phase, list[float]]:
        """Recent durations of the phases that surveys compare, oldest first."""
        return {phase: self.reader.phase_seconds(phase) for phase in SAMPLES}

    def stack(self, config: ObserverConfig) -> str:
        """Where it stands, in as few words as a message should have."""
        if self._stack is None or self.ending is not None:
            return ""
        stack = stacks.take(self.reader.pid, self._stack, config.stack_signal, config.stack_seconds)
        return stacks.trim(stack, _STACK_CHARACTERS)

    def _last_standing(self) -> RankStatus:
        if self.ending is Ending.FINISHED:
            # Not gone, as a diagnosis means it: nothing is wrong with it, unless somebody waits for it.
            return RankStatus(self.rank, Process.RUNNING, self._read(), waiting=False)
        return RankStatus(self.rank, Process.GONE, self._read())

    def _note_stall(self, now: float) -> None:
        """Keep what the trainer shows once it has stood still for a while."""
        if self.progress is None or self.progress.silent_seconds < _STALL_SECONDS:
            return
        since = now - self.progress.silent_seconds
        if self._stall is None or since - self._stall.since > _STALL_SECONDS:
            self._stall = _Stall(self._read() or self.progress, since)
        self._stall.until = now

    def _note_timeout(self, now: float) -> None:
        """How its wait compares with the timeout of the group that it waits in."""
        self.is_pressed = False
        silent = 0.0 if self.progress is None else self.progress.silent_seconds
        timeouts = {line.key: line.timeout for line in self._lines() if line.timeout is not None}
        if silent < _PRESSED * min(timeouts.values(), default=math.inf) or (read := self._read()) is None:
            return
        allowed = math.inf if read.inside is None else timeouts.get(read.inside.line, math.inf)
        self.is_pressed = silent >= _PRESSED * allowed
        if silent >= _TIMED_OUT * allowed:
            self._timed_out_at = now

    def _has_timed_out(self, now: float) -> bool:
        return now - self._timed_out_at < _WATCHDOG_SECONDS

    def _stalled(self, config: ObserverConfig, now: float) -> Progress | None:
        """What it showed while it stood still for too long, a short time ago; None if it did not, or still
        does."""
        if (stall := self._stall) is None:
            return None
        lasted, passed = stall.until - stall.since, now - stall.until
        limit = _KILL_SECONDS if self._was_killed else _WATCHDOG_SECONDS
        is_over = self.ending is not None or passed > 2 * config.poll_seconds
        return stall.progress if lasted > config.floor_seconds and passed < limit and is_over else None

    def _operations(self, standing: RankStatus) -> Mapping[str, Any] | None:
        return None if standing.progress is None else self.reader.operations(standing.progress.step)

    def _lines(self) -> tuple[CommGroup, ...]:
        return tuple(self.reader.lines().values())

    def _read(self) -> Progress | None:
        try:
            return self.reader.read()
        except TornRecordError:  # it publishes faster than one can read: it is well
            return self.progress

    def _is_excused(self, config: ObserverConfig, silent_seconds: float) -> bool:
        if self.reader.paused or self.progress is None:
            return True
        granted = allowance(config, self.progress.phase, self.reader.step_seconds())
        return granted is not None and silent_seconds < granted

    def _open_pidfd(self) -> int | None:
        try:
            descriptor = os.pidfd_open(self.reader.pid)
        except OSError:
            return None
        if self.reader.trainer() is Process.GONE:  # and its number is perhaps another's
            os.close(descriptor)
            return None
        return descriptor


def _exit_status(pid: int) -> int | None:
    """Of a process for which nobody has waited yet; afterwards only its parent knows."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it is gone, or there is no descriptor left to look with
        return None
    return int(fields[-1]) if fields[0] == "Z" else None


def _ending_of(status: int | None, *, is_exiting: bool) -> Ending:
    if status is None:
        return Ending.FINISHED if is_exiting else Ending.FAILED
    if status == 0:
        return Ending.FINISHED if is_exiting else Ending.LEFT
    asked = status & 0x7F in _ASKED or status >> 8 in {128 + number for number in _ASKED}
    return Ending.ASKED if asked else Ending.FAILED
