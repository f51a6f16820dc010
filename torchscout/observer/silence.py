"""When silence is too long (paper, section 7; docs/design.md, "Silence"). Pure: it is told the time.

A rank is silent for as long as it has published nothing. This says when that is worth asking the
other ranks, and when to ask again; who is to blame is for the diagnosis of the round it causes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from torchscout.config import ObserverConfig
from torchscout.decision.progress import Phase, Progress

__all__ = ["SilenceDetector", "allowance", "threshold"]

_LONGEST_REPEAT_SECONDS = 300.0
_SUSPENDED_SECONDS = 2.0
_REMEMBERED = 64


def threshold(config: ObserverConfig, phase: Phase, step_seconds: Sequence[float]) -> float:
    """Seconds of silence that are not yet remarkable, given the recent steps' durations."""
    usual = max(config.min_silence_seconds, config.silence_multiple * _p99(step_seconds))
    return max(usual, allowance(config, phase, step_seconds) or 0.0)


def allowance(config: ObserverConfig, phase: Phase, step_seconds: Sequence[float]) -> float | None:
    """What a rank is granted beyond the usual for what it is doing; None where that is nothing special."""
    granted = {
        Phase.START: config.startup_seconds,
        Phase.CHECKPOINT_READ: config.checkpoint_read_seconds,
        Phase.CHECKPOINT_WRITE: config.checkpoint_write_seconds,
        Phase.EVALUATION: config.evaluation_seconds,
    }.get(phase)
    if step_seconds:
        return granted
    # The first step compiles and connects in whatever phase it is.
    return max(config.startup_seconds, granted or 0.0)


class SilenceDetector:
    """One observer's memory of its trainer's silence.

    ``config`` may be replaced at any time. Called at every poll; one that comes much too late means
    that the observer itself, and perhaps the whole job, was suspended: such time counts for
    nobody's silence, nor does time during which the trainer asked to be left alone.
    """

    def __init__(self, config: ObserverConfig) -> None:
        self.config = config
        self._watching_since = -math.inf
        self._last_poll: float | None = None
        self._rounds = 0
        self._held_at: tuple[int, int] | None = None
        self._next_round = -math.inf
        self._held_steps: deque[int] = deque(maxlen=_REMEMBERED)

    @property
    def rounds(self) -> int:
        """Rounds held during the present silence."""
        return self._rounds

    def is_due(
        self,
        progress: Progress,
        step_seconds: Sequence[float],
        *,
        paused: bool,
        now: float,
        is_pressed: bool = False,
    ) -> bool:
        """Whether a round should be announced now.

        ``is_pressed`` if the library will soon end the trainer for waiting: whoever is behind it must be
        found before that, whatever its silence is allowed to be.
        """
        late = max(self.config.min_silence_seconds, self.config.poll_seconds + _SUSPENDED_SECONDS)
        suspended = self._last_poll is not None and now - self._last_poll > late
        self._last_poll = now
        if paused or suspended:
            self._watching_since = now
        if progress.coordinate != self._held_at:
            self._rounds, self._held_at, self._next_round = 0, None, -math.inf
        usual = threshold(self.config, progress.phase, self._ordinary(progress.step, step_seconds))
        is_silent = is_pressed or self.silent_seconds(progress, now) > usual
        return is_silent and not paused and now >= self._next_round

    def silent_seconds(self, progress: Progress, now: float) -> float:
        """The trainer's silence as far as it was watched."""
        return min(progress.silent_seconds, now - self._watching_since)

    def round_held(self, coordinate: tuple[int, int] | None, now: float) -> None:
        """A round was announced or took place, by whomever, while the trainer stood at ``coordinate``.

        It is not announced again until the trainer moves, or a growing while has passed: the
        situation may develop.
        """
        if coordinate != self._held_at:
            self._rounds, self._held_at = 0, coordinate
        if coordinate is not None and coordinate[0] not in self._held_steps:
            self._held_steps.append(coordinate[0])
        doubled = min(self._rounds, 30)  # a silence of days must not outgrow a float
        pause = min(self.config.repeat_seconds * 2**doubled, _LONGEST_REPEAT_SECONDS)
        self._rounds += 1
        self._next_round = now + pause

    def _ordinary(self, step: int, step_seconds: Sequence[float]) -> Sequence[float]:
        """The recent steps without as many of the longest as were looked at for a hang.

        Otherwise a hang that ended would count as a usual step, and hide the next one for many more.
        """
        remarkable = sum(step - len(step_seconds) <= held < step for held in self._held_steps)
        return sorted(step_seconds)[: max(1, len(step_seconds) - remarkable)]


def _p99(values: Sequence[float]) -> float:
    """By nearest rank: below a hundred values the largest, so that a periodic slow step is no alarm."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else 0.0
