"""Decides how much time checks take: their intervals, and how many expert shapes each of them replays.

Ranks measure different times. Each votes with its own, and the most cautious vote counts for all.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch

from torchscout.config import ReplayConfig
from torchscout.replay.schedule import MOST_TOGETHER, OverheadBudget, Rotation

__all__ = ["EXPERTS", "Pace", "PaceVote"]

EXPERTS = "experts"
"""The recipe that goes through a catalog of shapes; only an accepted check advances it."""
_REMEMBERED = 64
"""Intervals between checks."""


class PaceVote(NamedTuple):
    """One rank's vote; the highest value of each field counts."""

    stretch: int = 1
    """The factor for intervals."""
    fewest: int = -MOST_TOGETHER
    """How many expert shapes fit in a check, negated, so that the lowest number counts."""


class Pace:
    """The time that steps and checks take on this rank."""

    def __init__(self, config: ReplayConfig, device: torch.device, paths: int) -> None:
        """``paths`` are the expert shapes in a cycle of this rank."""
        self._config, self._device, self._paths = config, device, paths
        self._budget = OverheadBudget()
        self.steps: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        """The milliseconds of a step between each two checks, with the step of the second one. A check waits
        for the device, which the host may be ahead of in between."""
        self._last_check: tuple[int, float] | None = None

    def start_over(self) -> None:
        """Forget how long steps took: the job has loaded a checkpoint, or had no checks for some time."""
        self.steps.clear()
        self._last_check = None

    def has_replayed(self, step: int) -> None:
        """Note how long steps have taken since the last check."""
        now = time.monotonic()
        if self._last_check is not None:
            last, since = self._last_check
            self.steps.append((step, 1000 * (now - since) / (step - last)))
        self._last_check = step, now

    def now(self) -> float:
        """The time; with a budget, not before the device has finished the work of training."""
        if self._config.max_overhead is not None and self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    def step_took(self, seconds: float) -> None:
        self._budget.step_took(seconds)

    def check_took(self, seconds: float, shapes: int, on_shapes: float) -> None:
        self._budget.check_took(seconds, shapes, on_shapes)

    def share(self, stretch: int) -> float | None:
        """The share of time that checks take; None if not known yet."""
        return self._budget.share(min(self._config.intervals.values()) * stretch)

    def vote(self) -> PaceVote:
        intervals, budget = self._config.intervals, self._config.max_overhead
        stretch = self._budget.stretch(min(intervals.values()), budget)
        interval = intervals.get(EXPERTS)
        if not self._paths or interval is None:  # this rank has time for as many as the others have
            return PaceVote(stretch)
        fitting = self._budget.together(interval * stretch, budget)
        return PaceVote(stretch, -min(self._paths, fitting))

    def adopt(self, agreed: PaceVote, rotation: Rotation, step: int) -> None:
        """Apply what all ranks have agreed on after the check at this step."""
        if self._config.max_overhead is not None:
            rotation.change(agreed.stretch, step, {EXPERTS: -agreed.fewest})
