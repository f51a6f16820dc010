"""Decides what is replayed at the end of which step (paper, section 6.1 and "System overhead").

Pure arithmetic over step numbers and measured times. Every rank computes the same rotation; changes are made
on all ranks at the same step. Ranks measure different times, of which the longest counts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Due", "OverheadBudget", "Rotation"]


@dataclass(frozen=True, slots=True)
class Due:
    """One recipe's turn."""

    kind: str
    target: int | None
    """Index of the target; None if this rank has none, and only takes part in votes."""


class Rotation:
    """Each recipe has its own interval and rotates over its own targets."""

    def __init__(self, targets: Mapping[str, int], intervals: Mapping[str, int]) -> None:
        self._targets = {kind: count for kind, count in targets.items() if kind in intervals}
        self._intervals = {kind: intervals[kind] for kind in self._targets}
        self._stretch = 1
        self._next = dict(self._intervals)
        self._turns = dict.fromkeys(self._targets, 0)
        self._last = dict.fromkeys(self._targets, 0)
        """The step of each recipe's last turn."""
        self.rounds = 0
        """Number of checks so far; selects the source replica."""

    def start_after(self, step: int) -> None:
        """Count from this step on, after a checkpoint was loaded."""
        self._last = dict.fromkeys(self._last, step)
        self._next = {kind: step + interval * self._stretch for kind, interval in self._intervals.items()}

    def due(self, step: int) -> list[Due]:
        """Return what to replay at the end of this step, usually nothing."""
        return [
            Due(kind, self._turns[kind] % self._targets[kind] if self._targets[kind] else None)
            for kind, when in self._next.items()
            if when == step
        ]

    def is_due(self, kind: str, step: int) -> bool:
        return self._next.get(kind) == step

    def finished(self, step: int) -> None:
        """Advance. Called after the check at the end of this step, regardless of its outcome."""
        for due in self.due(step):
            self._turns[due.kind] += 1
            self._last[due.kind] = step
            self._next[due.kind] = step + self._intervals[due.kind] * self._stretch
        self.rounds += 1

    def take_back(self, kind: str, step: int) -> None:
        """Repeat a recipe's turn at this step, which was not accepted."""
        if self._last.get(kind) == step and self._turns[kind]:
            self._turns[kind] -= 1

    def state_dict(self) -> dict[str, Any]:
        return {"turns": dict(self._turns)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the rotation of an earlier run, for the recipes that it had."""
        self._turns |= {kind: int(turns) for kind, turns in state["turns"].items() if kind in self._turns}

    def change(self, intervals: Mapping[str, int], stretch: int, step: int) -> None:
        """Use these intervals times ``stretch`` from now on; a recipe without an interval is not replayed."""
        wanted = {kind: interval for kind, interval in intervals.items() if kind in self._targets}
        if wanted == self._intervals and stretch == self._stretch:
            return
        self._intervals, self._stretch = wanted, stretch
        # From each recipe's last turn: frequent changes must not postpone a rare recipe forever.
        self._next = {
            kind: max(step + 1, self._last[kind] + interval * stretch) for kind, interval in wanted.items()
        }

    @property
    def stretch(self) -> int:
        return self._stretch

    def coverage(self) -> dict[str, dict[str, int]]:
        """Return each recipe's targets, how many were visited, whole cycles, and the current interval."""
        return {
            kind: {
                "targets": count,
                "visited": min(self._turns[kind], count),
                "cycles": self._turns[kind] // count,
                "interval": interval * self._stretch,
                "next_step": self._next[kind],
            }
            for kind, interval in self._intervals.items()
            if (count := self._targets[kind])
        }


_REMEMBERED = 32


class OverheadBudget:
    """Measures what steps and checks cost on this rank."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._checks: deque[float] = deque(maxlen=_REMEMBERED)

    def step_took(self, seconds: float) -> None:
        """Record the time of a step without its check."""
        self._steps.append(seconds)

    def check_took(self, seconds: float) -> None:
        self._checks.append(seconds)

    def share(self, interval: float) -> float | None:
        """Return the share of time spent in checks every ``interval`` steps; None if not known yet."""
        if not self._steps or not self._checks:
            return None
        check, training = statistics.median(self._checks), interval * statistics.median(self._steps)
        return check / (check + training)

    def stretch(self, interval: float, budget: float | None) -> int:
        """Return the factor for intervals to stay within the budget; 1 without a budget."""
        if budget is None or not self._steps or not self._checks:
            return 1
        check, step = statistics.median(self._checks), statistics.median(self._steps)
        needed = check * (1 - budget) / (budget * step)  # steps between checks
        return max(1, math.ceil(needed / interval))
