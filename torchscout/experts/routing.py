"""Computes the maximal path counts over all routings of T rows to E experts (beyond the paper's section 6.2).

If path counts are additive over experts, the exact Pareto set of all routings follows from the counts of one
expert for each number of rows. ``additivity`` tests that on measurements: the count of a path in every
executed routing must be the sum over its experts alone, and counts that are not additive must be a function
of the load. Nothing is executed here. ``templates`` covers the set.

Sets of numbers are integers: bit n is set if n is in the set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from torchscout.experts.coverage import Rows, ShapeProfile, maximal
from torchscout.utils.text import listed

__all__ = [
    "Additivity",
    "Counts",
    "ExpertCounts",
    "Loads",
    "RegimeOf",
    "RoutingPoint",
    "additivity",
    "alone",
    "chosen",
    "kinds_of",
    "mixtures",
    "numbers",
    "pareto_set",
    "period_of",
    "routings",
    "sums",
]


def numbers(bits: int) -> Iterator[int]:
    """Yield the members of a set, smallest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def sums(left: int, right: int) -> int:
    """Return the set of all sums of a member of ``left`` and a member of ``right``."""
    found = 0
    for start, length in _runs(right):
        found |= _smeared(left, length) << start
    return found


def chosen(total: int, sets: Sequence[int]) -> list[int]:
    """Return one member of each set, which add up to ``total``; there must be such a choice."""
    relevanted = [1]
    for bits in sets:
        relevanted.append(sums(relevanted[-1], bits))
    picked = []
    for before, bits in zip(relevanted[-2::-1], reversed(sets), strict=True):
        number = next(each for each in numbers(bits) if each <= total and before >> (total - each) & 1)
        picked.append(number)
        total -= number
    assert not total, f"{total} is left"
    return picked[::-1]


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive members, as start and length."""
    start = 0
    while bits:
        zeros = (bits & -bits).bit_length() - 1
        bits >>= zeros
        ones = (~bits & (bits + 1)).bit_length() - 1
        yield start + zeros, ones
        bits >>= ones
        start += zeros + ones


def _smeared(bits: int, length: int) -> int:
    """Return the union of the set shifted by 0 to ``length - 1``."""
    done = 1
    while done < length:
        shift = min(done, length - done)
        bits |= bits << shift
        done += shift
    return bits


Counts = NDArray[np.int64]

# [Note: all routings by their mixtures]
#
# The counts of one expert are measured for m = 0 to T rows. From m = 1 on they are periodic: P more rows
# always add the same counts F (such as one more row of whole tiles). P is determined from the table; without
# a period P = T. So a nonempty expert has m = aP + r rows with 1 <= r <= P and counts aF + g(r). All r with
# equal g(r) are one *kind* of expert; an empty expert is a kind of its own. The counts of a routing are AF +
# (the sum of its experts' g), where A is the sum of all a. They depend only on how many experts are of each
# kind, its *mixture*, and on A = (T - s) / P, where s is the sum of all r. There are few mixtures, and the
# possible sums s of each are kept as an exact set. Two mixtures of equally many experts with the same sums
# and the same load can be extended in the same ways, so the one with smaller counts can be dropped.


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """The contribution of one expert to a kernel's counts, for each number of rows."""

    paths: tuple[str, ...]
    """The additive paths, one for each of the first columns."""
    loads: tuple[str, ...]
    """Passes, whose numbers of tiles are the last columns; they determine regime and waves."""
    counts: Counts
    """One row for each number of rows, starting with 0."""

    def __post_init__(self) -> None:
        assert self.counts.shape[1] == len(self.paths) + len(self.loads), self.counts.shape
        assert self.counts.shape[0] > 1, "the counts of one row must be known"

    @property
    def most_rows(self) -> int:
        return len(self.counts) - 1

    def of(self, rows: Rows) -> Counts:
        """Return the counts of a routing with at most ``most_rows`` for each expert."""
        return self.counts[list(rows)].sum(axis=0)  # type: ignore[no-any-return]

    def load_of(self, counts: Counts) -> tuple[int, ...]:
        return tuple(map(int, counts[len(self.paths) :]))


RegimeOf = Callable[[tuple[int, ...], Rows], str]
"""Returns the fingerprint of routings with this load, given an example."""


@dataclass(frozen=True, slots=True)
class RoutingPoint:
    """A routing with its counts: a point of the Pareto set, or a template that covers some."""

    rows: Rows
    counts: Counts
    """As the columns of ``ExpertCounts``."""
    regime: str

    def covers(self, point: RoutingPoint) -> bool:
        return self.regime == point.regime and bool((self.counts >= point.counts).all())


@dataclass(frozen=True, slots=True)
class Kind:
    """Numbers of rows with equal counts except for whole periods."""

    counts: Counts
    residues: int
    """The set of these numbers in the first period."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The number of experts of each kind."""

    members: tuple[int, ...]
    counts: Counts
    """The sum over all experts, without whole periods."""
    sums: int
    """The set of possible numbers of rows in total, without whole periods."""

    def routing(self, kinds: Sequence[Kind], total: int, periods: int) -> Rows:
        """Return a routing with ``total`` rows, plus ``periods`` rows for the largest expert."""
        sets = [kind.residues for kind, count in zip(kinds, self.members, strict=True) for _ in range(count)]
        first, *rest = sorted(chosen(total, sets), reverse=True)
        return (first + periods, *rest)


def routings(tokens: int, experts: int, *, at_most: bool = False) -> int:
    """Return the number of routings of ``tokens`` rows, or of at most as many."""
    return comb(tokens + experts, experts) if at_most else comb(tokens + experts - 1, experts - 1)


def pareto_set(
    table: ExpertCounts, experts: int, tokens: int, regime: RegimeOf, *, at_most: bool = False
) -> tuple[RoutingPoint, ...]:
    """Return the maximal counts in each regime, over all routings of (``at_most``) ``tokens`` rows."""
    assert experts > 0, experts
    assert 0 <= tokens <= table.most_rows, f"{tokens} rows, known up to {table.most_rows}"
    period, more = period_of(table)
    kinds = kinds_of(table, period)
    regimes: dict[tuple[int, ...], str] = {}
    found: dict[str, list[_Found]] = defaultdict(list)
    for mixture in mixtures(kinds, experts, len(table.paths), lambda sums: sums & -sums if at_most else sums):
        for rest, periods in _lengths(mixture, tokens, period, at_most=at_most):
            counts = mixture.counts + periods * more
            load = table.load_of(counts)
            if load not in regimes:
                regimes[load] = regime(load, mixture.routing(kinds, rest, periods * period))
            found[regimes[load]].append((counts, mixture, rest, periods * period))
    return tuple(
        RoutingPoint(mixture.routing(kinds, rest, whole), counts, where)
        for where in sorted(found)
        for place in sorted(maximal(np.stack([each[0] for each in found[where]])))
        for counts, mixture, rest, whole in [found[where][place]]
    )


_Found = tuple[Counts, Mixture, int, int]


def _lengths(mixture: Mixture, tokens: int, period: int, *, at_most: bool) -> Iterator[tuple[int, int]]:
    """Yield the possible rows of a mixture without whole periods, and the number of periods."""
    if mixture.sums == 1:  # all experts are empty
        if at_most or not tokens:
            yield 0, 0
    elif at_most:
        fewest = next(numbers(mixture.sums))
        yield from ((fewest, periods) for periods in range((tokens - fewest) // period + 1))
    else:
        for rest in range(tokens % period, min(tokens, mixture.sums.bit_length()) + 1, period):
            if mixture.sums >> rest & 1:
                yield rest, (tokens - rest) // period


def period_of(table: ExpertCounts) -> tuple[int, Counts]:
    """Return the smallest number of rows that always adds the same counts, and those counts."""
    counts = table.counts[1:]
    for period in range(1, len(counts) // 2 + 1):
        more = counts[period] - counts[0]
        if (counts[period:] - counts[:-period] == more).all():
            return period, more
    return len(counts), np.zeros_like(counts[0])


def kinds_of(table: ExpertCounts, period: int) -> list[Kind]:
    """Return the kind of empty experts, then all kinds of nonempty ones."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rows in range(1, period + 1):
        alike[tuple(table.counts[rows])].append(rows)
    nonempty = [Kind(table.counts[rows[0]], sum(1 << each for each in rows)) for rows in alike.values()]
    return [Kind(table.counts[0], 1), *nonempty]


def mixtures(
    kinds: Sequence[Kind], experts: int, loads_from: int, relevant: Callable[[int], int]
) -> list[Mixture]:
    """Return all mixtures except for those that can be dropped; see [Note: all routings by their mixtures].

    ``relevant`` returns the part of a mixture's set of sums that matters.
    """
    width = len(kinds[0].counts)
    states = [Mixture((), np.zeros(width, dtype=np.int64), 1)]
    for number, kind in enumerate(kinds):
        is_last = number == len(kinds) - 1
        folded = [1]
        for _ in range(experts):
            folded.append(sums(folded[-1], kind.residues))
        longer = []
        for state in states:
            left = experts - sum(state.members)
            for count in range(left if is_last else 0, left + 1):
                together = sums(state.sums, folded[count])
                counts = state.counts + count * kind.counts
                longer.append(Mixture((*state.members, count), counts, together))
        states = _needed(longer, loads_from, relevant)
    return states


def _needed(states: Iterable[Mixture], loads_from: int, relevant: Callable[[int], int]) -> list[Mixture]:
    alike: dict[tuple[int, int, bytes], list[Mixture]] = defaultdict(list)
    for state in states:
        alike[sum(state.members), relevant(state.sums), state.counts[loads_from:].tobytes()].append(state)
    return [
        group[place]
        for group in alike.values()
        for place in (maximal(np.stack([each.counts for each in group])) if len(group) > 1 else [0])
    ]


Loads = Mapping[str, Sequence[str]]
"""For each pass, the paths whose counts add up to its number of tiles."""


@dataclass(frozen=True, slots=True)
class Additivity:
    """Which paths are additive over experts."""

    adding: tuple[str, ...]
    by_load: tuple[str, ...]
    """Paths that are not, but are monotonic functions of the tiles of each pass."""
    reason: str = ""
    """Why the counts of routings do not follow from those of single experts; empty if they do."""
    table: ExpertCounts | None = None
    """The contribution of a single expert, if there is no ``reason``."""


def alone(rows: int, experts: int) -> Rows:
    """Return the routing that sends all rows to one expert."""
    return (rows, *[0] * (experts - 1))


def additivity(profiles: Mapping[Rows, ShapeProfile], experts: int, tokens: int, loads: Loads) -> Additivity:
    """Test additivity on ``profiles``: all ``alone(m, experts)`` up to ``tokens``, and other routings."""
    paths = sorted({path for profile in profiles.values() for path, _ in profile.path_counts})
    columns = _Columns(paths, loads)
    single = np.stack([columns.of(profiles[alone(rows, experts)]) for rows in range(tokens + 1)])
    share, rest = np.divmod(single[0], experts)
    single = single - (experts - 1) * share
    adds = rest == 0
    against: dict[str, Rows] = {}
    for rows, profile in profiles.items():
        if max(rows) <= tokens:
            equal = single[list(rows)].sum(axis=0) == columns.of(profile)
            against.update((path, rows) for path, now in zip(paths, adds & ~equal, strict=False) if now)
            adds &= equal
    adding = tuple(path for path, does in zip(paths, adds, strict=False) if does)
    by_load = tuple(path for path in paths if path not in adding)
    uneven = [name for name, does in zip(loads, adds[len(paths) :], strict=True) if not does]
    if uneven:
        return Additivity(adding, by_load, f"the tiles of {listed(uneven)} do not add up over experts")
    if reason := _not_by_load(profiles, by_load, columns, against):
        return Additivity(adding, by_load, reason)
    kept = np.flatnonzero(adds)
    return Additivity(adding, by_load, "", ExpertCounts(adding, tuple(loads), single[:, kept]))


class _Columns:
    """Converts a profile to numbers: its path counts, then its loads."""

    def __init__(self, paths: Sequence[str], loads: Loads) -> None:
        self._paths, self._loads = paths, loads

    def of(self, profile: ShapeProfile) -> Counts:
        counts = dict(profile.path_counts)
        taken = [counts.get(path, 0) for path in self._paths]
        return np.array([*taken, *self.load(profile)], dtype=np.int64)

    def load(self, profile: ShapeProfile) -> tuple[int, ...]:
        counts = dict(profile.path_counts)
        return tuple(sum(counts.get(path, 0) for path in paths) for paths in self._loads.values())


def _not_by_load(
    profiles: Mapping[Rows, ShapeProfile],
    paths: Sequence[str],
    columns: _Columns,
    against: Mapping[str, Rows],
) -> str:
    """Return why regime or counts are not functions of the load; empty if they are."""
    found: dict[tuple[int, ...], tuple[Rows, ShapeProfile]] = {}
    for rows, profile in profiles.items():
        example, before = found.setdefault(columns.load(profile), (rows, profile))
        if before.fingerprint != profile.fingerprint:
            return f"{example} and {rows} have the same tiles and run in different regimes"
        if wrong := [path for path in paths if _count(before, path) != _count(profile, path)]:
            uneven = f"{listed(wrong)} neither add up over experts nor follow from the tiles"
            return f"{uneven}: see {against.get(wrong[0], rows)}, and {rows} beside {example}"
    alike: dict[str, list[tuple[tuple[int, ...], ShapeProfile]]] = defaultdict(list)
    for load, (_, profile) in found.items():
        alike[profile.fingerprint].append((load, profile))
    for group in alike.values():
        for path in paths:
            if _shrinks([(load, _count(profile, path)) for load, profile in group]):
                return f"{path} becomes rarer with more tiles"
    return ""


def _count(profile: ShapeProfile, path: str) -> int:
    return dict(profile.path_counts).get(path, 0)


def _shrinks(counts: Sequence[tuple[tuple[int, ...], int]]) -> bool:
    loads = np.array([load for load, _ in counts])
    taken = np.array([count for _, count in counts])
    below = (loads[:, None, :] <= loads[None, :, :]).all(axis=2)
    return bool((below & (taken[:, None] > taken[None, :])).any())
