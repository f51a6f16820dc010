"""A trainer as its observer sees it: progress, process, stacks, phase times (paper, section 7). Linux only.

Nothing is exchanged while a job is healthy. So each observer first compares its trainer's phase times with
that trainer's own steps and history, and announces a survey only if they are remarkable (paper, section 6,
opening). ``decision.straggler`` then decides which rank is slow.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from torchscout.config import ObserverConfig
from torchscout.decision.progress import (
    CommGroup,
    How,
    Phase,
    Process,
    Progress,
    RankReport,
    status_in_words,
)
from torchscout.errors import TornRecordError
from torchscout.observer import stacks
from torchscout.observer.record.reader import ProgressReader
from torchscout.observer.rounds.protocol import MAX_STACK
from torchscout.observer.silence import LONGEST_REPEAT_SECONDS, allowance
from torchscout.run.folder import End, read_end
from torchscout.run.folder import How as HowEnded
from torchscout.utils.procfs import MemoryKills, process_stat

__all__ = ["SAMPLES", "Ending", "SurveySchedule", "TrainerView", "typical_seconds"]

SAMPLES = {Phase.INPUT: 5, Phase.CHECKPOINT_READ: 3, Phase.CHECKPOINT_WRITE: 3}
"""The phases that are compared, each by the median of this many durations: one slow batch, or the first
checkpoint, proves nothing. Checkpoints are rare, so a few must do."""
_TREND_RATIO = 2.0
_TREND_SHARE = 0.05
"""A phase that became slower by this ratio is remarkable from this share of the time on."""
_TREND_REPEATS = 4
"""For how many ``repeat_seconds`` that holds: with quick steps the slow durations soon fill the history, and
a survey must be repeated."""

Durations = Mapping[Phase, Sequence[float]]
"""Recent durations of each phase in seconds, oldest first."""


def typical_seconds(durations: Durations) -> dict[Phase, float]:
    """Return the recent median duration of each phase that has enough durations."""
    return {
        phase: statistics.median(durations[phase][-count:])
        for phase, count in SAMPLES.items()
        if len(durations[phase]) >= count
    }


class SurveySchedule:
    """Decides when one observer announces a survey. ``config`` may be replaced at any time."""

    def __init__(self, config: ObserverConfig) -> None:
        self.config = config
        self._last: dict[Phase, float] = {}
        self._arrivals = {phase: deque[float](maxlen=count + 1) for phase, count in SAMPLES.items()}
        """When the latest durations were first seen."""
        self._surveyed: dict[Phase, frozenset[float]] = {}
        """The durations that the last survey compared."""
        self._slower_until: dict[Phase, float] = {}
        self._pause = 0.0
        self._held_at = -math.inf
        self._next_survey = -math.inf

    def is_due(self, durations: Durations, step_seconds: Sequence[float], now: float) -> bool:
        """Return whether to announce a survey now; called at every poll."""
        self._note_arrivals(durations, now)
        if not any(step_seconds):  # the first step counts as 0
            return False
        remarkable = [
            phase
            for phase, recent in typical_seconds(durations).items()
            if 1000 * recent >= self.config.phase_ms
            and recent > self._usual_share(phase, durations[phase], now) * self._period(phase, step_seconds)
        ]
        return now >= self._next_survey and any(self._is_fresh(phase, durations) for phase in remarkable)

    def announced(self, now: float) -> None:
        """Note an announcement; it is repeated after a while if no hub holds the survey."""
        self._next_survey = now + self.config.repeat_seconds

    def held(self, durations: Durations, now: float) -> None:
        """Note that a survey takes place, announced by any rank. Pauses between surveys grow, until there
        was none for a long time."""
        if now - self._held_at > 2 * LONGEST_REPEAT_SECONDS:
            self._pause = 0.0
        self._pause = min(max(2 * self._pause, self.config.repeat_seconds), LONGEST_REPEAT_SECONDS)
        self._held_at, self._next_survey = now, now + self._pause
        self._surveyed = {phase: _latest(phase, durations) for phase in SAMPLES}

    def _note_arrivals(self, durations: Durations, now: float) -> None:
        for phase, arrivals in self._arrivals.items():
            last = durations[phase][-1] if durations[phase] else None
            if last is not None and last != self._last.get(phase):
                self._last[phase] = last
                arrivals.append(now)

    def _usual_share(self, phase: Phase, durations: Sequence[float], now: float) -> float:
        """Return the share of the time that the phase may take without being remarkable."""
        count = SAMPLES[phase]
        recent, before = statistics.median(durations[-count:]), durations[:-count]
        if len(before) >= count and recent > _TREND_RATIO * statistics.median(before):
            self._slower_until[phase] = now + _TREND_REPEATS * self.config.repeat_seconds
        is_slower = now < self._slower_until.get(phase, -math.inf)
        return min(_TREND_SHARE, self.config.phase_share) if is_slower else self.config.phase_share

    def _period(self, phase: Phase, step_seconds: Sequence[float]) -> float:
        """Return how often the phase occurs: a checkpoint is longer than a step in any healthy job."""
        if phase is Phase.INPUT:
            return statistics.median(filter(None, step_seconds))
        arrivals = self._arrivals[phase]
        if len(arrivals) < SAMPLES[phase]:
            return math.inf  # they were not watched for long enough
        return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)

    def _is_fresh(self, phase: Phase, durations: Durations) -> bool:
        """Comparing the same durations again would confirm nothing."""
        return _latest(phase, durations).isdisjoint(self._surveyed.get(phase, frozenset()))


def _latest(phase: Phase, durations: Durations) -> frozenset[float]:
    return frozenset(durations[phase][-SAMPLES[phase] :])


_MOST_CHARACTERS = 300
"""Of an exception."""
_REQUESTS_TO_END = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
_STALL_SECONDS = 1.0
_WATCHDOG_SECONDS = 60.0
"""How long a watchdog may take to end a trainer: NCCL's writes dumps first. Meanwhile the rank that was
waited for may have arrived, and the job may have continued for a while."""
_NEAR_TIMEOUT, _TIMED_OUT = 0.85, 0.95
"""The share of a timeout after which a round is announced, and after which it counts as over: the trainer is
only polled, while a watchdog acts at once."""


class Ending(Enum):
    """How a trainer has ended."""

    FINISHED = "finished"
    """On purpose: its session was closed, or its interpreter exited with status 0."""
    LEFT = "left"
    """With status 0 but without closing its session, as by ``os._exit(0)``. Many jobs end like that, on all
    ranks. If only one rank does, its peers fail afterwards."""
    ASKED = "asked"
    """By SIGTERM, SIGINT or SIGHUP, or by a decision: usually the whole job is being ended."""
    FAILED = "failed"
    """In any other way, or in an unknown one; also while an exception ends the interpreter, which may take
    long: checkpoints are written first."""


@dataclass(slots=True)
class _Stall:
    """A trainer that has not moved for a while.

    Its record after a watchdog has ended it may not show what it waited for: the watchdog may abort
    communicators first, or the rank that was waited for has arrived by then.
    """

    progress: Progress
    since: float
    until: float = 0.0
    """When the stall was last seen."""

    @property
    def seconds(self) -> float:
        return self.until - self.since


class TrainerView:
    """What the last ``look`` has seen. It never waits for the trainer, except shortly for its stacks."""

    def __init__(
        self, record: Path, stack: Path | None, run_dir: Path | None = None, error_file: Path | None = None
    ) -> None:
        """``error_file`` is where torchrun's ``record`` writes the exception that ends the trainer."""
        self.reader = ProgressReader(record)
        self._record, self._run_dir = str(record), run_dir
        self.progress: Progress | None = None
        """Without operations, which are only read for a report."""
        self.ending: Ending | None = None
        """None as long as it has not ended."""
        self.near_timeout = False
        """Whether it has used most of the time that the communication library allows an operation."""
        self._stack, self._error_file = stack, error_file
        self._memory = MemoryKills(self.reader.pid)
        self._gone_since: float | None = None  # unless it has finished
        self._wait_status: int | None = None
        self._stall: _Stall | None = None
        self._timed_out_at = -math.inf
        self.pidfd = self._open_pidfd()
        """Readable once the process has ended; None if the kernel does not support it."""

    @property
    def rank(self) -> int:
        return self.reader.rank

    def look(self, now: float) -> None:
        """Update everything from the trainer's record and process."""
        self.progress = self.reader.glance(now) or self.progress
        if self.ending is not None:
            return
        self._note_stall(now)
        self._note_timeout(now)
        if self.reader.has_finished:
            self.ending = Ending.FINISHED
        elif self.reader.is_asked:  # it lives on until there is a verdict
            self.ending, self._gone_since = Ending.ASKED, now
        elif self.reader.trainer() is Process.GONE:
            self._wait_status = _wait_status(self.reader.pid)
            self.ending = _ending_of(self._wait_status, is_exiting=self.reader.is_exiting)
            if self.reader.is_restarting or (self._wait_status is None and self._was_terminated()):
                self.ending = Ending.ASKED
            self._gone_since = None if self.ending is Ending.FINISHED else now
        if self.reader.is_failing:  # a launcher may end it meanwhile, which is not why it ends
            self.ending = Ending.FAILED
            self._gone_since = now if self._gone_since is None else self._gone_since

    @property
    def is_verdict_due(self) -> bool:
        """Whether the observers are to say why it ends. A launcher asks the trainers of a job that has lost a
        machine to end, often before anything else shows that; before the first step nobody is missed."""
        has_begun = self.progress is not None and self.progress.coordinate > (0, 0)
        return self.ending is Ending.FAILED or (
            self.ending is Ending.ASKED and self.reader.is_asked and has_begun
        )

    @property
    def _how(self) -> How:
        """How it ended early."""
        if self._wait_status is not None and self._wait_status & 0x7F == signal.SIGKILL:
            return "killed"
        if self.ending is Ending.ASKED:
            return "asked"
        return "unknown" if self._wait_status is None and not self.reader.is_failing else "failed"

    def how(self, ending: Ending) -> HowEnded:
        """Return the ending in the words of the run directory."""
        if ending is Ending.FAILED:
            exited = self._wait_status is not None and not self._wait_status & 0x7F
            exited |= self.reader.is_failing
            return "failed" if exited else "killed"
        return "interrupted" if ending is Ending.ASKED else "finished"

    @cached_property
    def why(self) -> str:
        """Why it ended: its exception, or what is known of a lack of memory; empty if nothing is known.

        Read once it has ended, before its observer writes down how.
        """
        end = self._own_end()
        if end is not None and end.how == "failed" and end.why:
            return _short(end.why)
        if self._error_file is not None and (message := _message_in(self._error_file)):
            return _short(message)
        is_killed = self._wait_status is None or self._wait_status & 0x7F == signal.SIGKILL
        return self._memory.since() if is_killed and self.ending is Ending.FAILED else ""

    def ended_by(self) -> str:
        """Return signal or exit status and why, for the run directory; empty if nothing is known."""
        status = "" if self._wait_status is None else status_in_words(self._wait_status)
        why = self.why
        return f"{status} ({why})" if status and why else status or why

    def _own_end(self) -> End | None:
        return None if self._run_dir is None else read_end(self._run_dir, self.rank, self._record)

    def _was_terminated(self) -> bool:
        """Return whether it recorded that SIGTERM ends it; see ``session.session``."""
        end = self._own_end()
        return end is not None and end.how == "interrupted"

    def kill(self) -> None:
        """End the trainer, unless it has ended; that counts as finished, since it was decided."""
        if self.ending is None and self.pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.dismiss()

    def dismiss(self) -> None:
        """Stop watching on the trainer's request, which counts as finished."""
        self.ending = self.ending or Ending.FINISHED

    def report(self, config: ObserverConfig, silent_seconds: float, now: float) -> RankReport:
        """Return what to report in a round, except the stacks."""
        if self.ending is None and self.reader.trainer() is Process.GONE:
            self.look(now)  # it has ended since the last look, and how must be known
        has_ended, seen_at = self.ending is not None, now if self._gone_since is None else self._gone_since
        progress = self._read()
        # To a diagnosis, gone means failed; nothing is wrong with a trainer that has finished.
        has_finished = self.ending is Ending.FINISHED
        running = Process.RUNNING if has_finished else self.reader.trainer()
        return RankReport(
            rank=self.rank,
            process=Process.GONE if has_ended and not has_finished else running,
            progress=progress,
            groups=self._groups(),
            waiting=False if has_finished else None,
            moving=not has_ended and silent_seconds < config.min_silence_seconds / 2,
            excused=not has_ended and self._is_excused(config, silent_seconds),
            gone_seconds=None if self._gone_since is None else now - self._gone_since,
            how=None if self._gone_since is None else self._how,
            wait_status=None if self._gone_since is None else self._wait_status,
            why="" if self._gone_since is None else self.why,
            stalled=self._stalled(config, seen_at),
            near_timeout=not has_ended and self.near_timeout,
            is_restarting=self.reader.is_restarting,
            is_incomplete=self.reader.dropped > 0,
            has_timed_out=seen_at - self._timed_out_at < _WATCHDOG_SECONDS,
            operations=None if progress is None else self.reader.operations(progress.step),
            phase_seconds={} if has_ended else typical_seconds(self.phase_seconds()),
        )

    def phase_seconds(self) -> dict[Phase, list[float]]:
        """Return recent durations of the phases that surveys compare, oldest first."""
        return {phase: self.reader.phase_seconds(phase) for phase in SAMPLES}

    def stack(self, config: ObserverConfig) -> str:
        """Return the trainer's stacks, short enough for a message; empty if it gives none."""
        if self._stack is None or self.ending is not None:
            return ""
        stack = stacks.take(self.reader.pid, self._stack, config.stack_signal, config.stack_seconds)
        return stacks.trim(stack, MAX_STACK)

    def _note_stall(self, now: float) -> None:
        if self.progress is None or self.progress.silent_seconds < _STALL_SECONDS:
            return
        since, stall = now - self.progress.silent_seconds, self._stall
        if stall is not None and since - stall.since > _STALL_SECONDS:
            # A short wait does not hide the long one before it, because of which a watchdog may act.
            if self.progress.silent_seconds < stall.seconds and now - stall.until < _WATCHDOG_SECONDS:
                return
            stall = None
        self._stall = stall or _Stall(self._read() or self.progress, since)
        self._stall.until = now

    def _note_timeout(self, now: float) -> None:
        """Compare its wait with the timeout of the group that it waits in."""
        self.near_timeout = False
        silent = 0.0 if self.progress is None else self.progress.silent_seconds
        timeouts = {each.key: each.timeout for each in self._groups() if each.timeout is not None}
        if (
            silent < _NEAR_TIMEOUT * min(timeouts.values(), default=math.inf)
            or (read := self._read()) is None
        ):
            return
        allowed = math.inf if read.inside is None else timeouts.get(read.inside[0], math.inf)
        self.near_timeout = silent >= _NEAR_TIMEOUT * allowed
        if silent >= _TIMED_OUT * allowed:
            self._timed_out_at = now

    def _stalled(self, config: ObserverConfig, now: float) -> Progress | None:
        """Return its progress during a recent stall that was too long and is over, or None."""
        if (stall := self._stall) is None:
            return None
        is_over = self.ending is not None or now - stall.until > 2 * config.poll_seconds
        was_long = stall.seconds > config.min_silence_seconds or self._timed_out_at >= stall.since
        return stall.progress if was_long and is_over and now - stall.until < _WATCHDOG_SECONDS else None

    def _groups(self) -> tuple[CommGroup, ...]:
        return tuple(self.reader.groups().values())

    def _read(self) -> Progress | None:
        try:
            return self.reader.read()
        except TornRecordError:  # torn read; the trainer is alive
            return self.progress

    def _is_excused(self, config: ObserverConfig, silent_seconds: float) -> bool:
        if self.reader.paused or self.progress is None:
            return True
        allowed = allowance(config, self.progress.phase, self.reader.step_seconds())
        return allowed is not None and silent_seconds < allowed

    def _open_pidfd(self) -> int | None:
        try:
            descriptor = os.pidfd_open(self.reader.pid)
        except OSError:
            return None
        if self.reader.trainer() is Process.GONE:  # its process id may be another's by now
            os.close(descriptor)
            return None
        return descriptor


def _message_in(error_file: Path) -> str:
    """Return the message that torchrun's ``record`` has written, if there is one."""
    try:
        message = json.loads(error_file.read_text())["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _short(text: str) -> str:
    return " ".join(text.split())[:_MOST_CHARACTERS]


def _wait_status(pid: int) -> int | None:
    """Return the status of a process that nobody has waited for yet; afterwards only its parent knows."""
    try:
        stat = process_stat(pid)
    except OSError:  # for example, no file descriptor is left
        return None
    return stat.wait_status if stat is not None and stat.has_ended else None


def _ending_of(wait_status: int | None, *, is_exiting: bool) -> Ending:
    if not wait_status:
        if is_exiting:
            return Ending.FINISHED
        return Ending.FAILED if wait_status is None else Ending.LEFT
    number = wait_status & 0x7F or (wait_status >> 8) - 128  # a shell exits with 128 and the signal
    return Ending.ASKED if number in _REQUESTS_TO_END else Ending.FAILED
