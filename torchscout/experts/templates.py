"""Finds few routings that together cover all routings of T rows (beyond the paper's section 6.2).

``templates_for`` computes them. ``routed`` executes them and checks that each has the expected counts. If
path counts are not additive over experts, there is a reason instead of a table, and only uniform shapes are
covered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from torchscout.experts.coverage import (
    CoverCheck,
    Observed,
    Rows,
    ShapeProfile,
    Table,
    by_size,
    check_cover,
)
from torchscout.experts.discovery import Executions
from torchscout.experts.routing import (
    Additivity,
    Counts,
    ExpertCounts,
    Loads,
    RegimeOf,
    RoutingPoint,
    additivity,
    alone,
    kinds_of,
    mixtures,
    numbers,
    pareto_set,
    period_of,
    routings,
)

__all__ = [
    "Routed",
    "Routings",
    "first_shapes",
    "routed",
    "templates_for",
]


@dataclass(frozen=True, slots=True)
class Templates:
    """A cover of the Pareto set, with a lower bound of its size."""

    chosen: tuple[RoutingPoint, ...]
    """They may have more rows than what they cover."""
    least: int
    """Lower bound: the number of routings found of which no two can share a template."""


# [Note: how many periods a template needs]
#
# A mixture with A whole periods has counts AF + g, so it covers a routing's counts c if g >= c wherever F is
# 0, and if A is at least (c - g) / F elsewhere. The least such A is the best one: loads grow with A, the load
# is among the counts, and a regime is a range of loads. If the least A of each of several routings is in
# their regime, then so is the greatest of these. So a template that covers each of them covers all of them.


def templates_for(
    table: ExpertCounts, experts: int, points: Sequence[RoutingPoint], regime: RegimeOf
) -> Templates:
    """Return routings of any number of rows that cover all these points, each in its own regime."""
    regimes = {table.load_of(point.counts): point.regime for point in points}
    candidates = _Candidates(table, experts, regime, regimes)
    chosen: list[RoutingPoint] = []
    least = 0
    for where in sorted({point.regime for point in points}):
        alike = [point for point in points if point.regime == where]
        periods = np.stack([candidates.periods_for(point) for point in alike], axis=1)
        covers = periods >= 0
        for number, covered in _greedy(covers).items():
            count = int(periods[number, covered].max())
            chosen.append(
                RoutingPoint(candidates.rows(number, count), candidates.counts(number, count), where)
            )
        least += _packed(covers)
    return Templates(tuple(sorted(chosen, key=lambda each: by_size(each.rows))), least)


class _Candidates:
    """All possible templates: mixtures of experts with any number of whole periods."""

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
        """Return the routing of this mixture with the fewest rows."""
        mixture = self._mixtures[number]
        return mixture.routing(self._kinds, next(numbers(mixture.sums)), periods * self._period)

    def periods_for(self, point: RoutingPoint) -> NDArray[np.int64]:
        """Return, for each mixture, the fewest whole periods with which it covers this point, or -1."""
        lacking = point.counts - self._counts
        grows = self._more > 0
        needed = -(-lacking[:, grows] // self._more[grows])
        periods = np.maximum(needed.max(axis=1, initial=0), 0)
        unmet = (lacking[:, ~grows] > 0).any(axis=1)
        # Whole periods are rows of an expert, so a mixture of empty experts has none.
        empty = np.array([mixture.sums == 1 for mixture in self._mixtures]) & (periods > 0)
        possible = np.flatnonzero(~(unmet | empty))
        alike = self._in_regime(possible, periods[possible], point.regime)
        found = np.full(len(periods), -1, dtype=np.int64)
        found[possible[alike]] = periods[possible[alike]]
        return found

    def _in_regime(
        self, possible: NDArray[np.int64], periods: NDArray[np.int64], regime: str
    ) -> NDArray[np.bool_]:
        first = self._loads_from
        loads = self._counts[possible, first:] + periods[:, None] * self._more[first:]
        distinct, example, which = np.unique(loads, axis=0, return_index=True, return_inverse=True)
        for load, place in zip(map(tuple, distinct.tolist()), example, strict=True):
            if load not in self._regimes:
                self._regimes[load] = self._ask(load, self.rows(int(possible[place]), int(periods[place])))
        alike = np.array(
            [self._regimes[load] == regime for load in map(tuple, distinct.tolist())], dtype=bool
        )
        return alike[which.reshape(-1)]


def _greedy(covers: NDArray[np.bool_]) -> dict[int, NDArray[np.int64]]:
    """Return the mixture that covers most, then the one that covers most of the rest, and so on."""
    picked: dict[int, NDArray[np.int64]] = {}
    left = np.ones(covers.shape[1], dtype=bool)
    while left.any():
        number = int((covers & left).sum(axis=1).argmax())
        covered = covers[number] & left
        assert covered.any(), "every routing of the Pareto set covers itself"
        picked[number] = np.flatnonzero(covered)
        left &= ~covered
    return picked


def _packed(covers: NDArray[np.bool_]) -> int:
    """Count points of which no two share a mixture, greedily from those with the fewest mixtures."""
    taken = np.zeros(covers.shape[0], dtype=bool)
    count = 0
    for place in np.argsort(covers.sum(axis=0), kind="stable"):
        if not (taken & covers[:, place]).any():
            taken |= covers[:, place]
            count += 1
    return count


SAMPLES = 200
"""Number of random routings that are executed to test additivity and templates."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The result for all routings of a kernel."""

    table: Table | None
    reason: str = ""
    """Why there is no table."""
    additivity: Additivity | None = None
    pareto: int = 0
    """Size of the Pareto set."""
    least: int = 0
    """Lower bound for the number of templates; 0 if templates must be routings of the admitted rows."""


@dataclass(frozen=True, slots=True)
class Routings:
    """A set of routings to cover."""

    experts: int
    tokens: int
    """Rows of all experts together."""
    at_most: bool = False
    """Whether fewer rows are included."""

    def __str__(self) -> str:
        return f"every routing of {'at most ' * self.at_most}{self.tokens} rows to {self.experts} experts"

    def admit(self, rows: Rows) -> bool:
        return sum(rows) <= self.tokens if self.at_most else sum(rows) == self.tokens


def samples(admitted: Routings, count: int = SAMPLES, seed: int = 0) -> Iterator[Rows]:
    """Yield random routings, even and uneven, with empty experts and boundaries at round numbers."""
    drawing = random.Random(seed)
    experts = admitted.experts
    for _ in range(count):
        used = drawing.randint(1, experts)
        tokens = drawing.randint(0, admitted.tokens) if admitted.at_most else admitted.tokens
        cuts = sorted(_cut(drawing, tokens) for _ in range(used - 1))
        parts = [after - before for before, after in pairwise([0, *cuts, tokens])]
        parts += [0] * (experts - used)
        drawing.shuffle(parts)
        yield tuple(parts)


def _cut(drawing: random.Random, tokens: int) -> int:
    anywhere = drawing.randint(0, tokens)
    rounded = anywhere & -(1 << drawing.randint(0, tokens.bit_length()))
    return min(max(rounded + drawing.choice((-1, 0, 0, 1)), 0), tokens)


def first_shapes(admitted: Routings) -> list[Rows]:
    """Return the shapes to execute first: single experts, and routings to test additivity."""
    single = (alone(rows, admitted.experts) for rows in range(admitted.tokens + 1))
    return list(dict.fromkeys([*single, *samples(admitted)]))


# [Note: what the Pareto set teaches]
#
# A path can be additive in all random routings and not in extreme ones: last tiles are, until there are more
# tiles than programs. The Pareto set contains the extremes, so all of it is executed. A routing that
# contradicts additivity is added to the tests; its path is then a function of the load, and the set is
# computed again from the remaining paths, as long as their number decreases.


def routed(
    name: str,
    facts: Mapping[str, str],
    loads: Loads,
    admitted: Routings,
    *,
    executions: Executions,
    on_progress: Callable[[Observed], None] = lambda _: None,
) -> Routed:
    """Measure single experts, test additivity, compute the templates, execute and check them."""
    profiles: dict[Rows, ShapeProfile] = {}
    for rows in first_shapes(admitted):
        seen = executions.of(rows)
        on_progress(seen)
        if seen.profile is None:
            return Routed(None, f"{rows}: {seen.reason}")
        profiles[rows] = seen.profile
    before, regime = None, _regime(executions)
    while True:
        adds = additivity(profiles, admitted.experts, admitted.tokens, loads)
        if adds.table is None:
            return Routed(None, adds.reason, adds)
        points = pareto_set(adds.table, admitted.experts, admitted.tokens, regime, at_most=admitted.at_most)
        surprise = _executed(adds.table, points, executions, profiles)
        if not surprise:
            break
        if adds.adding == before:
            return Routed(None, surprise, adds)
        before = adds.adding
    fewest = templates_for(adds.table, admitted.experts, points, regime)
    # More rows than admitted may select another kernel; routings of the Pareto set do not have more.
    reasons = []
    for found in (fewest, Templates(points, 0)):
        checked = _checked(adds.table, admitted, found, executions, profiles)
        if isinstance(checked, CoverCheck):
            count = routings(admitted.tokens, admitted.experts, at_most=admitted.at_most)
            chosen = tuple(map(executions.of, dict.fromkeys(each.rows for each in found.chosen)))
            covered = (checked.occurrences, checked.covered)
            table = Table(name, dict(facts), str(admitted), count, chosen, (), *covered)
            return Routed(table, "", adds, len(points), found.least)
        reasons.append(checked)
    return Routed(None, reasons[0], adds)


def _regime(executions: Executions) -> RegimeOf:
    def regime(_: tuple[int, ...], rows: Rows) -> str:
        seen = executions.of(rows)
        return seen.reason if seen.profile is None else seen.profile.fingerprint

    return regime


def _executed(
    table: ExpertCounts,
    derived: Sequence[RoutingPoint],
    executions: Executions,
    profiles: dict[Rows, ShapeProfile],
) -> str:
    """Execute these, add them to ``profiles``, and return the first unexpected result, or ''."""
    surprise = ""
    for each in derived:
        seen = executions.of(each.rows)
        if seen.profile is None:
            return f"{each.rows}: {seen.reason}"
        profiles[each.rows] = seen.profile
        surprise = surprise or _unexpected(table, each, seen.profile)
    return surprise


def _checked(
    table: ExpertCounts,
    admitted: Routings,
    found: Templates,
    executions: Executions,
    profiles: Mapping[Rows, ShapeProfile],
) -> CoverCheck | str:
    """Verify by execution that templates have the expected counts and cover everything executed."""
    executed = {rows: profile for rows, profile in profiles.items() if admitted.admit(rows)}
    if surprise := _executed(table, found.chosen, executions, executed):
        return surprise
    check = check_cover(executed, [each.rows for each in found.chosen])
    return check if check.complete else f"the templates do not cover {check.uncovered[0]}"


def _unexpected(table: ExpertCounts, meant: RoutingPoint, profile: ShapeProfile) -> str:
    if profile.fingerprint != meant.regime:
        return f"{meant.rows} ran in another regime than expected: {profile.fingerprint}"
    counts = dict(profile.path_counts)
    for path, expected in zip(table.paths, meant.counts, strict=False):
        if counts.get(path, 0) != expected:
            return f"{meant.rows} took {path} {counts.get(path, 0)} times, its experts alone {expected}"
    return ""
