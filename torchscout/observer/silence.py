"""Decides when silence is too long (paper, section 7; DESIGN.md, "Silence"). Pure: callers pass the time.

A rank is silent while it publishes nothing. This module decides when to announce a round, and when to repeat
it. The diagnosis of that round decides who is to blame.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from torchscout.config import ObserverConfig
from torchscout.decision.progress import Phase, Progress

__all__ = ["LONGEST_REPEAT_SECONDS", "SilenceDetector", "allowance", "seconds_for", "threshold"]

LONGEST_REPEAT_SECONDS = 300.0
_SUSPENDED_SECONDS = 2.0
_REMEMBERED_STEPS = 64


def threshold(config: ObserverConfig, phase: Phase, step_seconds: Sequence[float]) -> float:
    """Return the seconds of silence that are still normal, given the durations of recent steps."""
    usual = max(config.min_silence_seconds, config.silence_multiple * _p99(step_seconds))
    return max(usual, allowance(config, phase, step_seconds) or 0.0)


def allowance(config: ObserverConfig, phase: Phase, step_seconds: Sequence[float]) -> float | None:
    """Return the extra time that a rank has in this phase; None where no special allowance applies."""
    allowed = {
        Phase.START: config.startup_seconds,
        Phase.CHECKPOINT_READ: config.checkpoint_read_seconds,
        Phase.CHECKPOINT_WRITE: config.checkpoint_write_seconds,
        Phase.EVALUATION: config.evaluation_seconds,
    }.get(phase)
    # The first step compiles and connects, in whatever phase it is.
    return allowed if step_seconds else max(config.startup_seconds, allowed or 0.0)


_SMALL_JOB = 1024
_POST_SECONDS = 5e-5
"""Processor time of a hub to receive and check one post."""


def seconds_for(seconds: float, size: int) -> float:
    """Return a time limit of a hub as it applies to a job of ``size`` ranks: a hub that reads the posts of
    many ranks is busy, not lost."""
    return seconds + max(0, size - _SMALL_JOB) * _POST_SECONDS


class SilenceDetector:
    """Tracks the silence of one trainer. ``config`` may be replaced at any time.

    ``is_due`` is called at every poll. A poll that comes much too late means that the observer, and perhaps
    the whole job, was suspended. Such time does not count as silence, nor does a pause.
    """

    def __init__(self, config: ObserverConfig) -> None:
        self.config = config
        self.rounds = 0
        """Rounds held during the present silence."""
        self._watching_since = -math.inf
        self._last_poll: float | None = None
        self._round_at: tuple[int, int] | None = None
        """The trainer's coordinate in the last round."""
        self._next_round = -math.inf
        self._round_steps: deque[int] = deque(maxlen=_REMEMBERED_STEPS)

    def is_due(
        self,
        progress: Progress,
        step_seconds: Sequence[float],
        *,
        paused: bool,
        now: float,
        near_timeout: bool = False,
    ) -> bool:
        """Return whether to announce a round now.

        ``near_timeout`` means that the communication library will soon end the trainer for waiting, so the
        cause must be found before that, whatever silence is allowed.
        """
        late = max(self.config.min_silence_seconds, self.config.poll_seconds + _SUSPENDED_SECONDS)
        suspended = self._last_poll is not None and now - self._last_poll > late
        self._last_poll = now
        if paused or suspended:
            self._watching_since = now
        if progress.coordinate != self._round_at:
            self.rounds, self._round_at, self._next_round = 0, None, -math.inf
        usual = self.threshold(progress, step_seconds)
        is_silent = near_timeout or self.silent_seconds(progress, now) > usual
        return is_silent and not paused and now >= self._next_round

    def threshold(self, progress: Progress, step_seconds: Sequence[float]) -> float:
        """Return the seconds of silence that are still normal for the trainer now."""
        return threshold(self.config, progress.phase, self._ordinary(progress.step, step_seconds))

    def silent_seconds(self, progress: Progress, now: float) -> float:
        """Return how long the trainer has been silent while it was watched."""
        return min(progress.silent_seconds, now - self._watching_since)

    def round_held(self, coordinate: tuple[int, int] | None, now: float) -> None:
        """Note that a round took place, announced by any rank, while the trainer was at ``coordinate``.

        The next one is due when the trainer has moved and stopped again, or after a pause that grows: the
        situation may change.
        """
        if coordinate != self._round_at:
            self.rounds, self._round_at = 0, coordinate
        if coordinate is not None and coordinate[0] not in self._round_steps:
            self._round_steps.append(coordinate[0])
        doubled = min(self.rounds, 30)  # a silence of days must not overflow a float
        self.rounds += 1
        self._next_round = now + min(self.config.repeat_seconds * 2**doubled, LONGEST_REPEAT_SECONDS)

    def _ordinary(self, step: int, step_seconds: Sequence[float]) -> Sequence[float]:
        """Return the recent durations without the longest ones, as many as there were steps with a round.

        Otherwise a hang that has ended would count as a usual step, and hide the next one.
        """
        with_round = sum(step - len(step_seconds) <= each < step for each in self._round_steps)
        return sorted(step_seconds)[: max(1, len(step_seconds) - with_round)]


def _p99(values: Sequence[float]) -> float:
    """By nearest rank: below a hundred values the largest, so that a periodic slow step raises no alarm."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else 0.0
