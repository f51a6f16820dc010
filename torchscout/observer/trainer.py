"""A trainer as its observer sees it: its progress, its process, its stacks, its phase times (paper, section
7). Linux only.

Nothing is exchanged while a job is healthy. So each observer first compares its trainer's phase times with
that trainer's own steps and past, and asks the others (a survey) only if those are remarkable (paper,
section 6, opening). Which rank is slow ``decision.straggler.diagnosis`` decides.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torchscout.config import ObserverConfig
from torchscout.decision.progress import CommGroup, Phase, Process, Progress, RankStatus
from torchscout.errors import TornRecordError
from torchscout.observer import stacks
from torchscout.observer.protocol import RankReport
from torchscout.observer.record.directory import How
from torchscout.observer.record.reader import ProgressReader
from torchscout.observer.silence import allowance
from torchscout.utils.procfs import process_stat

__all__ = ["SAMPLES", "Ending", "Surveying", "TrainerView", "typical_seconds"]

SAMPLES = {Phase.INPUT: 5, Phase.CHECKPOINT_READ: 3, Phase.CHECKPOINT_WRITE: 3}
"""The phases that are compared, each by the median of this many durations: one slow batch, or the first
checkpoint, says nothing. Checkpoints are rare, so that few must do."""
_TREND_RATIO = 2.0
_TREND_SHARE = 0.05
"""A phase that became this much slower is remarkable from this share of the time on."""
_TREND_REPEATS = 4
"""For how many ``repeat_seconds`` that holds: quick steps soon make the slow ones all there is to remember,
and a survey wants to be repeated."""
_LONGEST_REPEAT_SECONDS = 300.0

Durations = Mapping[Phase, Sequence[float]]
"""Recent ones of each phase in seconds, oldest first."""


def typical_seconds(durations: Durations) -> dict[Phase, float]:
    """What each phase takes lately, where there are enough durations to tell."""
    return {
        phase: statistics.median(durations[phase][-count:])
        for phase, count in SAMPLES.items()
        if len(durations[phase]) >= count
    }


class Surveying:
    """One observer's memory of its trainer's phases and of the surveys it took part in.

    ``config`` may be replaced at any time.
    """

    def __init__(self, config: ObserverConfig) -> None:
        self.config = config
        self._last: dict[Phase, float] = {}
        self._arrivals = {phase: deque[float](maxlen=count + 1) for phase, count in SAMPLES.items()}
        """When the latest durations were first seen."""
        self._shown: dict[Phase, frozenset[float]] = {}
        """What went into the last survey."""
        self._slower_until: dict[Phase, float] = {}
        self._pause = 0.0
        self._held_at = -math.inf
        self._next_survey = -math.inf

    def is_due(self, durations: Durations, step_seconds: Sequence[float], now: float) -> bool:
        """Whether a survey should be announced now; called at every poll."""
        self._note_arrivals(durations, now)
        if not step_seconds:
            return False
        remarkable = [
            phase
            for phase, recent in typical_seconds(durations).items()
            if 1000 * recent >= self.config.phase_ms
            and recent > self._usual_share(phase, durations[phase], now) * self._period(phase, step_seconds)
        ]
        return now >= self._next_survey and any(self._is_fresh(phase, durations) for phase in remarkable)

    def announced(self, now: float) -> None:
        """Should no hub take it up, it is announced again after a while."""
        self._next_survey = now + self.config.repeat_seconds

    def held(self, durations: Durations, now: float) -> None:
        """A survey takes place, whoever announced it. The next one is a growing while away.

        Until the job has been calm for long: whatever comes then is something else.
        """
        if now - self._held_at > 2 * _LONGEST_REPEAT_SECONDS:
            self._pause = 0.0
        self._pause = min(max(2 * self._pause, self.config.repeat_seconds), _LONGEST_REPEAT_SECONDS)
        self._held_at, self._next_survey = now, now + self._pause
        self._shown = {phase: _latest(phase, durations) for phase in SAMPLES}

    def _note_arrivals(self, durations: Durations, now: float) -> None:
        for phase, arrivals in self._arrivals.items():
            last = durations[phase][-1] if durations[phase] else None
            if last is not None and last != self._last.get(phase):
                self._last[phase] = last
                arrivals.append(now)

    def _usual_share(self, phase: Phase, durations: Sequence[float], now: float) -> float:
        """What part of the time the phase may take before that is remarkable."""
        count = SAMPLES[phase]
        recent, before = statistics.median(durations[-count:]), durations[:-count]
        if len(before) >= count and recent > _TREND_RATIO * statistics.median(before):
            self._slower_until[phase] = now + _TREND_REPEATS * self.config.repeat_seconds
        is_slower = now < self._slower_until.get(phase, -math.inf)
        return min(_TREND_SHARE, self.config.phase_share) if is_slower else self.config.phase_share

    def _period(self, phase: Phase, step_seconds: Sequence[float]) -> float:
        """How often the phase occurs: a checkpoint is longer than a step in any healthy job."""
        if phase is Phase.INPUT:
            return statistics.median(step_seconds)
        arrivals = self._arrivals[phase]
        if len(arrivals) < SAMPLES[phase]:
            return math.inf  # they came before one could see how often
        return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)

    def _is_fresh(self, phase: Phase, durations: Durations) -> bool:
        """To compare the same durations again would confirm nothing."""
        return _latest(phase, durations).isdisjoint(self._shown.get(phase, frozenset()))


def _latest(phase: Phase, durations: Durations) -> frozenset[float]:
    return frozenset(durations[phase][-SAMPLES[phase] :])


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


class TrainerView:
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

    def post(self, config: ObserverConfig, silent_seconds: float, now: float) -> RankReport:
        """What to say in a round, but for the stacks."""
        if self.ending is not None:
            standing = self._last_standing()
            return RankReport(
                standing,
                self._lines(),
                gone_seconds=None if self._gone_since is None else now - self._gone_since,
                was_killed=self._was_killed,
                stalled=self._stalled(config, now if self._gone_since is None else self._gone_since),
                has_timed_out=self._has_timed_out(now if self._gone_since is None else self._gone_since),
                operations=self._operations(standing),
            )
        standing = RankStatus(self.rank, self.reader.trainer(), self._read())
        return RankReport(
            standing,
            self._lines(),
            operations=self._operations(standing),
            moving=silent_seconds < config.min_silence_seconds / 2,
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
        return stall.progress if lasted > config.min_silence_seconds and passed < limit and is_over else None

    def _operations(self, standing: RankStatus) -> Mapping[str, Any] | None:
        return None if standing.progress is None else self.reader.operations(standing.progress.step)

    def _lines(self) -> tuple[CommGroup, ...]:
        return tuple(self.reader.lines().values())

    def _read(self) -> Progress | None:
        try:
            return self.reader.read()
        except TornRecordError:  # torn read; the trainer is alive
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
        stat = process_stat(pid)
    except OSError:  # for example, no file descriptor is left to look with
        return None
    return stat.wait_status if stat is not None and stat.has_ended else None


def _ending_of(status: int | None, *, is_exiting: bool) -> Ending:
    if status is None:
        return Ending.FINISHED if is_exiting else Ending.FAILED
    if status == 0:
        return Ending.FINISHED if is_exiting else Ending.LEFT
    asked = status & 0x7F in _ASKED or status >> 8 in {128 + number for number in _ASKED}
    return Ending.ASKED if asked else Ending.FAILED
