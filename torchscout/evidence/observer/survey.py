"""When a rank's own phases have become worth comparing with its peers' (paper, section 6, opening).

Nothing is exchanged while a job is healthy. So each observer first holds its trainer's times against
that trainer's own steps and past, and only what is remarkable there is a reason to ask the others: a
survey. Who is slow is for ``phase_diagnosis`` to say. Pure: it is told the time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from torchscout.config import ObserverConfig
from torchscout.decision.progress import Phase

__all__ = ["SAMPLES", "Surveying", "typical_seconds"]

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
