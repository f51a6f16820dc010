"""Few routings that together do whatever any routing of T rows can do (beyond the paper's section 6.2).

Pure, as ``routing`` is; that a template really does what is expected of it is measured by ``additivity``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchscout.evidence.catalog.cover import by_size
from torchscout.evidence.catalog.profile import Rows
from torchscout.evidence.catalog.residues import numbers
from torchscout.evidence.catalog.routing import (
    Counts,
    ExpertCounts,
    RegimeOf,
    RoutingPoint,
    kinds_of,
    mixtures,
    period_of,
)

__all__ = ["Template", "Templates", "templates_for"]


@dataclass(frozen=True, slots=True)
class Template:
    """A routing that stands for others; it may have more rows than they."""

    rows: Rows
    counts: Counts
    """As the columns of ``ExpertCounts``."""
    regime: str

    def covers(self, point: RoutingPoint) -> bool:
        return self.regime == point.regime and bool((self.counts >= point.counts).all())


@dataclass(frozen=True, slots=True)
class Templates:
    """A cover of the Pareto set, and how far from the smallest it can be."""

    chosen: tuple[Template, ...]
    least: int
    """No cover has fewer: so many routings of the Pareto set have, two by two, no template in common."""


# [Note: how many periods a template needs]
#
# A mixture with A whole periods does AF + g, so it covers a routing's counts c if g >= c wherever F is 0, and
# if A is at least (c - g) / F elsewhere. The least such A is the best one: loads only grow with A, the load
# is among the counts, and a regime is a stretch of loads. If the least A is in the routing's regime, then so
# is the greatest of the least A's of several routings of that regime. A template therefore covers together
# whatever it covers one by one.


def templates_for(
    table: ExpertCounts, experts: int, points: Sequence[RoutingPoint], regime: RegimeOf
) -> Templates:
    """Routings of any number of rows that cover all these points, each in its own regime."""
    regimes = {table.load_of(point.counts): point.regime for point in points}
    offer = _Offer(table, experts, regime, regimes)
    chosen: list[Template] = []
    least = 0
    for where in sorted({point.regime for point in points}):
        alike = [point for point in points if point.regime == where]
        periods = np.stack([offer.periods_for(point) for point in alike], axis=1)
        covers = periods >= 0
        for number, covered in _greedy(covers).items():
            count = int(periods[number, covered].max())
            chosen.append(Template(offer.rows(number, count), offer.counts(number, count), where))
        least += _packed(covers)
    return Templates(tuple(sorted(chosen, key=lambda each: by_size(each.rows))), least)


class _Offer:
    """Every mixture of experts that a template could be, with any number of whole periods."""

    def __init__(
        self, table: ExpertCounts, experts: int, regime: RegimeOf, regimes: dict[tuple[int, ...], str]
    ) -> None:
        self._period, self._more = period_of(table)
        self._kinds = kinds_of(table, self._period)
        self._mixtures = mixtures(self._kinds, experts, len(table.paths), lambda _: 0)
        self._counts = np.stack([mixture.counts for mixture in self._mixtures])
        self._loads_from = len(table.paths)
        self._ask = regime
        self._regimes = regimes

    def counts(self, number: int, periods: int) -> Counts:
        return self._counts[number] + periods * self._more  # type: ignore[no-any-return]

    def rows(self, number: int, periods: int) -> Rows:
        """The routing with the fewest rows that is this mixture."""
        mixture = self._mixtures[number]
        return mixture.routing(self._kinds, next(numbers(mixture.sums)), periods * self._period)

    def periods_for(self, point: RoutingPoint) -> NDArray[np.int64]:
        """For each mixture the fewest whole periods with which it covers this point, or -1."""
        lacking = point.counts - self._counts
        grows = self._more > 0
        needed = -(-lacking[:, grows] // self._more[grows])
        periods = np.maximum(needed.max(axis=1, initial=0), 0)
        unmet = (lacking[:, ~grows] > 0).any(axis=1)
        # Whole periods are rows of some expert: where all are empty there is none that could hold them.
        homeless = np.array([mixture.sums == 1 for mixture in self._mixtures]) & (periods > 0)
        possible = np.flatnonzero(~(unmet | homeless))
        alike = self._in_regime(possible, periods[possible], point.regime)
        found = np.full(len(periods), -1, dtype=np.int64)
        found[possible[alike]] = periods[possible[alike]]
        return found

    def _in_regime(
        self, offered: NDArray[np.int64], periods: NDArray[np.int64], regime: str
    ) -> NDArray[np.bool_]:
        first = self._loads_from
        loads = self._counts[offered, first:] + periods[:, None] * self._more[first:]
        distinct, example, which = np.unique(loads, axis=0, return_index=True, return_inverse=True)
        for load, place in zip(map(tuple, distinct.tolist()), example, strict=True):
            if load not in self._regimes:
                self._regimes[load] = self._ask(load, self.rows(int(offered[place]), int(periods[place])))
        alike = np.array(
            [self._regimes[load] == regime for load in map(tuple, distinct.tolist())], dtype=bool
        )
        return alike[which.reshape(-1)]


def _greedy(covers: NDArray[np.bool_]) -> dict[int, NDArray[np.int64]]:
    """The mixture that covers most, then the one that covers most of the rest; each with what it is for."""
    picked: dict[int, NDArray[np.int64]] = {}
    left = np.ones(covers.shape[1], dtype=bool)
    while left.any():
        number = int((covers & left).sum(axis=1).argmax())
        mine = covers[number] & left
        assert mine.any(), "every routing of the Pareto set is a template for itself"
        picked[number] = np.flatnonzero(mine)
        left &= ~mine
    return picked


def _packed(covers: NDArray[np.bool_]) -> int:
    """Points that pairwise share no mixture, taken as they come, those with fewest mixtures first."""
    taken = np.zeros(covers.shape[0], dtype=bool)
    count = 0
    for place in np.argsort(covers.sum(axis=0), kind="stable"):
        if not (taken & covers[:, place]).any():
            taken |= covers[:, place]
            count += 1
    return count
