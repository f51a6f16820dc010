"""Decides what is replayed at the end of which step (paper, section 6.1 and "System overhead").

Pure arithmetic over step numbers and measured times. Every rank computes the same rotation; changes are made
on all ranks at the same step. Ranks measure different times, of which the longest counts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

__all__ = ["MOST_TOGETHER", "Alike", "Due", "InTurn", "Order", "OverheadBudget", "PathOrder", "Rotation"]

MOST_TOGETHER = 8
"""Expert shapes in one check at most, since all of them are in memory at the same time."""
_ONE_EACH: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Due:
    """One recipe's turn."""

    kind: str
    target: int | None
    """Index of the target; None if this rank has none, and only takes part in votes."""


class Order(Protocol):
    """The order in which a recipe goes through its targets."""

    @property
    def cycle(self) -> int:
        """Turns that cover everything once; 0 if this rank has no targets."""
        ...

    def targets(self, turn: int, visit: int, count: int) -> list[int]:
        """Return the targets of ``count`` turns from this one on, which make the recipe's visit number
        ``visit``."""
        ...


@dataclass(frozen=True, slots=True)
class InTurn:
    """One target after the other."""

    cycle: int

    def targets(self, turn: int, visit: int, count: int) -> list[int]:  # noqa: ARG002  see Order
        return [each % self.cycle for each in range(turn, turn + count)]


@dataclass(frozen=True, slots=True)
class Alike:
    """Modules that run the same kernels at the same shapes."""

    modules: int
    shapes: int


class PathOrder:
    """Goes through the shapes of modules that are alike; another module represents them in each check.

    A *path* is one shape of one set of modules. What a device does there is the same whichever module runs
    it, so a cycle visits every path once and not every module at every path. All shapes of one check are
    replayed on one module, whose call has to be captured only once. With one shape in each check, every
    module represents its set once in as many checks as there are modules, and has been replayed at every
    shape after as many as there are pairs. Targets are numbered set by set, then shape by shape, then module
    by module.
    """

    def __init__(self, sets: Sequence[Alike]) -> None:
        self._sets = sets
        pairs = [each.modules * each.shapes for each in sets]
        self._first = [sum(pairs[:number]) for number in range(len(sets))]
        self._paths = [(number, shape) for number, each in enumerate(sets) for shape in range(each.shapes)]

    @property
    def cycle(self) -> int:
        return len(self._paths)

    @property
    def modules(self) -> int:
        return sum(each.modules for each in self._sets)

    def targets(self, turn: int, visit: int, count: int) -> list[int]:
        paths = (self._paths[each % self.cycle] for each in range(turn, turn + count))
        return [self._target(number, shape, self._standing(number, visit)) for number, shape in paths]

    def every(self) -> list[int]:
        """Return as few targets as include every path and every module."""
        return [
            self._target(number, each % alike.shapes, each % alike.modules)
            for number, alike in enumerate(self._sets)
            for each in range(max(alike.shapes, alike.modules))
        ]

    def modules_in(self, targets: Collection[int]) -> int:
        """Return how many modules these targets belong to."""
        return len(
            {
                (number, (target - self._first[number]) % alike.modules)
                for target in targets
                for number, alike in enumerate(self._sets)
                if 0 <= target - self._first[number] < alike.modules * alike.shapes
            }
        )

    def _target(self, number: int, shape: int, module: int) -> int:
        return self._first[number] + shape * self._sets[number].modules + module

    def _standing(self, number: int, visit: int) -> int:
        """Return the module that represents its set in this visit."""
        # Once all combinations with a common remainder have been visited, the next remainder follows.
        alike = self._sets[number]
        return (visit + visit // math.lcm(alike.modules, self.cycle)) % alike.modules


class Rotation:
    """Each recipe has its own interval and goes through its own targets."""

    def __init__(self, targets: Mapping[str, int | Order], intervals: Mapping[str, int]) -> None:
        """``targets`` has the number of each recipe's targets, or the order in which they are replayed."""
        self._orders: dict[str, Order] = {
            kind: InTurn(each) if isinstance(each, int) else each
            for kind, each in targets.items()
            if kind in intervals
        }
        self._intervals = {kind: intervals[kind] for kind in self._orders}
        self._stretch = 1
        self._next = dict(self._intervals)
        self._turns = dict.fromkeys(self._orders, 0)
        self._visits = dict.fromkeys(self._orders, 0)
        """In how many checks each recipe was replayed; a check may have several turns of a recipe."""
        self._together = dict.fromkeys(self._orders, 1)
        self._last = dict.fromkeys(self._orders, 0)
        """The step of each recipe's last turn."""
        self._visited: dict[str, set[int | None]] = {kind: set() for kind in self._orders}
        self.rounds = 0
        """Number of checks so far; selects the source replica."""

    def start_after(self, step: int) -> None:
        """Count from this step on, after a checkpoint was loaded."""
        self._last = dict.fromkeys(self._last, step)
        self._next = {kind: step + interval * self._stretch for kind, interval in self._intervals.items()}

    def due(self, step: int) -> list[Due]:
        """Return what to replay at the end of this step, usually nothing."""
        return [
            Due(kind, target)
            for kind, when in self._next.items()
            if when == step
            for target in self._targets_of(kind)
        ]

    def _targets_of(self, kind: str) -> Sequence[int | None]:
        count = self._together[kind]
        if not self._orders[kind].cycle:
            return [None] * count
        return self._orders[kind].targets(self._turns[kind], self._visits[kind], count)

    def is_due(self, kind: str, step: int) -> bool:
        return self._next.get(kind) == step

    def turns_at(self, kind: str, step: int) -> int:
        """Return how many turns of this recipe are due at the end of this step."""
        return self._together[kind] if self.is_due(kind, step) else 0

    def finished(self, step: int) -> None:
        """Advance. Called after the check at the end of this step, regardless of its outcome."""
        for kind in [kind for kind, when in self._next.items() if when == step]:
            self._visited[kind].update(self._targets_of(kind))
            self._turns[kind] += self._together[kind]
            self._visits[kind] += 1
            self._last[kind] = step
            self._next[kind] = step + self._intervals[kind] * self._stretch
        self.rounds += 1

    def take_back(self, kind: str, step: int) -> None:
        """Repeat a recipe's turns at this step, which were not accepted. Called before ``change``."""
        if self._last.get(kind) == step and self._visits[kind]:
            self._turns[kind] -= self._together[kind]
            self._visits[kind] -= 1

    def state_dict(self) -> dict[str, Any]:
        return {"turns": dict(self._turns), "visits": dict(self._visits)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the rotation of an earlier run, for the recipes that it had."""
        visits = state.get("visits", state["turns"])  # earlier versions had one turn in each check
        self._turns |= {kind: int(turns) for kind, turns in state["turns"].items() if kind in self._turns}
        self._visits |= {kind: int(each) for kind, each in visits.items() if kind in self._visits}

    def position(self) -> dict[str, Any]:
        """Return where the rotation is, for ``move_to`` on another rank."""
        position = {"turns": dict(self._turns), "visits": dict(self._visits), "rounds": self.rounds}
        return position | {"stretch": self._stretch, "together": dict(self._together)}

    def move_to(self, position: Mapping[str, Any], step: int) -> None:
        """Continue after this step from the position of another rank."""
        self.load_state_dict(position)
        self.rounds, self._stretch = position["rounds"], position["stretch"]
        self._together |= {
            kind: each for kind, each in position["together"].items() if kind in self._together
        }
        self.start_after(step)

    def change(self, stretch: int, step: int, together: Mapping[str, int] = _ONE_EACH) -> None:
        """Use intervals times ``stretch`` from now on.

        ``together`` has the recipes with several turns in each check. It must be the same on all ranks.
        """
        self._together |= {kind: together.get(kind, 1) for kind in self._together}
        if stretch == self._stretch:
            return
        self._stretch = stretch
        # From each recipe's last turn: frequent changes must not postpone a rare recipe forever.
        self._next = {
            kind: max(step + 1, self._last[kind] + interval * stretch)
            for kind, interval in self._intervals.items()
        }

    @property
    def stretch(self) -> int:
        return self._stretch

    def coverage(self) -> dict[str, dict[str, int]]:
        """Return each recipe's targets, how many were visited, whole cycles, and the current interval.

        Where modules represent each other, targets are paths, and there are two more counts: of the modules,
        and of those that have been replayed at any shape since the job started.
        """
        return {
            kind: {
                "targets": count,
                "visited": min(self._turns[kind], count),
                "cycles": self._turns[kind] // count,
                "interval": interval * self._stretch,
                "next_step": self._next[kind],
                **self._modules_of(kind),
            }
            for kind, interval in self._intervals.items()
            if (count := self._orders[kind].cycle)
        }

    def turns(self) -> dict[str, dict[str, int]]:
        """Return each recipe's targets and the turns so far. May be called from any thread."""
        counts = {kind: self._orders[kind].cycle for kind in self._intervals}
        return {
            kind: {"targets": count, "turns": self._turns[kind]} for kind, count in counts.items() if count
        }

    def _modules_of(self, kind: str) -> dict[str, int]:
        if not isinstance(order := self._orders[kind], PathOrder):
            return {}
        visited = order.modules_in([each for each in self._visited[kind] if each is not None])
        return {
            "modules": order.modules,
            "modules_visited": visited,
            "together": self._together[kind],
        }


_REMEMBERED = 32


class OverheadBudget:
    """Measures what steps and checks cost on this rank."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._checks: deque[float] = deque(maxlen=_REMEMBERED)
        self._smallest: deque[float] = deque(maxlen=_REMEMBERED)
        """Times of checks as if each had one expert shape at most."""
        self._without: deque[float] = deque(maxlen=_REMEMBERED)
        """Times of checks with expert shapes, without these."""
        self._shapes: deque[float] = deque(maxlen=_REMEMBERED)
        """Times of one expert shape."""

    def step_took(self, seconds: float) -> None:
        """Record the time of a step without its check."""
        self._steps.append(seconds)

    def check_took(self, seconds: float, shapes: int = 0, on_shapes: float = 0.0) -> None:
        """Record the time of a check, of which ``on_shapes`` was spent on so many expert ``shapes``."""
        without = max(0.0, seconds - on_shapes)
        self._checks.append(seconds)
        self._smallest.append(without + on_shapes / max(1, shapes))
        if shapes:
            self._shapes.append(on_shapes / shapes)
            self._without.append(without)

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
        # A check with several expert shapes can do with fewer, and intervals need not grow for them.
        check, step = statistics.median(self._smallest), statistics.median(self._steps)
        needed = check * (1 - budget) / (budget * step)  # steps between checks
        return max(1, math.ceil(needed / interval))

    def together(self, interval: float, budget: float | None) -> int:
        """Return how many expert shapes fit in a check every ``interval`` steps; 1 without a budget."""
        if budget is None or not self._steps or not self._shapes:
            return 1
        allowed = budget / (1 - budget) * interval * statistics.median(self._steps)
        shape = max(statistics.median(self._shapes), 1e-9)
        fitting = (allowed - statistics.median(self._without)) / shape
        return max(1, min(MOST_TOGETHER, math.floor(fitting)))
