"""How often replay may run: a share of training's time that it must not exceed (paper, "System overhead").

Pure arithmetic over measured times. Ranks measure differently; the slowest one is followed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

__all__ = ["Cadence"]

_REMEMBERED = 32


class Cadence:
    """What steps and checks cost on this rank."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._checks: deque[float] = deque(maxlen=_REMEMBERED)

    def step_took(self, seconds: float) -> None:
        """Training alone, without the check at its end."""
        self._steps.append(seconds)

    def check_took(self, seconds: float) -> None:
        self._checks.append(seconds)

    def share(self, interval: float) -> float | None:
        """The part of the time that checks take when one is made every ``interval`` steps."""
        if not self._steps or not self._checks:
            return None
        check, training = statistics.median(self._checks), interval * statistics.median(self._steps)
        return check / (check + training)

    def stretch(self, interval: float, budget: float | None) -> int:
        """By how much intervals must grow to stay within the budget; 1 where there is none."""
        if budget is None or not self._steps or not self._checks:
            return 1
        check, step = statistics.median(self._checks), statistics.median(self._steps)
        needed = check * (1 - budget) / (budget * step)  # steps between checks
        return max(1, math.ceil(needed / interval))
