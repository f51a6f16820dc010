"""How fast copies are sent, so that training is not slowed by them (paper, section 8).

Copies share the network and the cores with training. GEMINI sends them in the gaps of training's own
communication, which it profiles first. Here a simpler rule approaches the same: while steps during a copy
take longer than usual, each of them halves the rate of the copy; each that does not doubles it again. So a
copy takes what training leaves, whatever it is that both need.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

__all__ = ["SLOWEST", "CopyPace", "RateLimit"]

SLOWEST = 64 << 20
"""Bytes in a second: the lowest rate. Slower copies would come too late to be of use."""
_FIRST = 1 << 30
"""Bytes in a second: the rate after the first slow step."""
_SLOWED = 1.05
"""A step that takes so many times longer than usual is slowed."""
_HISTORY, _ENOUGH = 32, 4


class CopyPace:
    """Chooses the rate of copies from the duration of training's steps."""

    def __init__(self) -> None:
        self.rate: int | None = None
        """Bytes in a second; None if copies are not limited."""
        self._usual: deque[float] = deque(maxlen=_HISTORY)

    def step_took(self, seconds: float, *, during_copy: bool) -> bool:
        """Add a step without a check, and return whether the rate has changed."""
        if not during_copy:
            self._usual.append(seconds)
        if not during_copy or len(self._usual) < _ENOUGH:
            return False
        before = self.rate
        if seconds > _SLOWED * statistics.median(self._usual):
            self.rate = _FIRST if before is None else max(SLOWEST, before // 2)
        elif before is not None:
            self.rate = None if before >= _FIRST else 2 * before
        return self.rate != before


class RateLimit:
    """Delays a sender. One thread sets ``rate`` while another calls ``sent``."""

    def __init__(self) -> None:
        self.rate: int | None = None
        """Bytes in a second; None: no limit."""
        self._allowed_at = 0.0

    def sent(self, size: int) -> None:
        """Wait until so many more bytes are within the limit."""
        if (rate := self.rate) is None:
            return
        now = time.monotonic()
        self._allowed_at = max(self._allowed_at, now) + size / rate
        time.sleep(self._allowed_at - now)
