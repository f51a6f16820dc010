"""What every way of routing T rows to E experts can make a kernel do (beyond the paper's section 6.2).

Where path counts add up over experts, the exact Pareto set of all routings follows from what one expert
does with each number of rows. ``additivity`` decides by measurements whether they add up: the count of a
path in every routing that was executed must be the sum of what each expert does alone, and what does not
add up must follow from the load. Pure: the executions are given. ``templates`` covers the set.

Sets of numbers are bits of an integer: bit n stands for n.
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
    "Kind",
    "Loads",
    "Mixture",
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
    "set_of",
    "sums",
]


def set_of(members: Iterable[int]) -> int:
    found = 0
    for number in members:
        found |= 1 << number
    return found


def numbers(bits: int) -> Iterator[int]:
    """Smallest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def sums(left: int, right: int) -> int:
    """Every number that is one of ``left`` plus one of ``right``."""
    found = 0
    for start, length in _runs(right):
        found |= _smeared(left, length) << start
    return found


def chosen(total: int, sets: Sequence[int]) -> list[int]:
    """One member of each set, together ``total``; there must be such a choice."""
    reached = [1]
    for bits in sets:
        reached.append(sums(reached[-1], bits))
    picked = []
    for before, bits in zip(reached[-2::-1], reversed(sets), strict=True):
        number = next(each for each in numbers(bits) if each <= total and before >> (total - each) & 1)
        picked.append(number)
        total -= number
    assert not total, f"{total} is left"
    return picked[::-1]


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """The stretches of consecutive members, each with its start and length."""
    start = 0
    while bits:
        zeros = (bits & -bits).bit_length() - 1
        bits >>= zeros
        ones = (~bits & (bits + 1)).bit_length() - 1
        yield start + zeros, ones
        bits >>= ones
        start += zeros + ones


def _smeared(bits: int, length: int) -> int:
    """Shifted by 0, 1 and so on up to ``length - 1``, all together."""
    done = 1
    while done < length:
        shift = min(done, length - done)
        bits |= bits << shift
        done += shift
    return bits


Counts = NDArray[np.int64]

# [Note: all routings by their mixtures]
#
# What an expert does with m rows is measured for m = 0 to T. From m = 1 on it repeats with some period P: P
# more rows add the same counts F, wherever they are added (a tile's worth of whole tiles). This is looked for
# in the table, not assumed; without a period P = T. So a nonempty expert has m = aP + r with 1 <= r <= P and
# counts aF + g(r), and the r with equal g(r) are one *kind* of expert; no rows at all are a kind of their
# own. The counts of a routing are AF + (the sum of its experts' g), where A is the sum of all a: they depend
# only on how many experts are of each kind, its *mixture*, and on A = (T - s) / P, where s is the sum of all
# r. There are few mixtures, and for each the sums s that its experts can have are a set, kept exactly. Two
# mixtures of equally many experts, with the same sums and the same load, go on alike whatever the other
# experts are; so the one with fewer counts may be dropped at once.


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """What one expert adds to a kernel's counts, for each number of rows."""

    paths: tuple[str, ...]
    """The paths that add up over experts, one for each of the first columns."""
    loads: tuple[str, ...]
    """What else adds up and decides the rest (regime, waves): tiles of each pass, in the last columns."""
    counts: Counts
    """A row for each number of rows, from 0 on."""

    def __post_init__(self) -> None:
        assert self.counts.shape[1] == len(self.paths) + len(self.loads), self.counts.shape
        assert self.counts.shape[0] > 1, "what one row does must be known"

    @property
    def most_rows(self) -> int:
        return len(self.counts) - 1

    def of(self, rows: Rows) -> Counts:
        """The counts of a routing, up to ``most_rows`` for each expert."""
        return self.counts[list(rows)].sum(axis=0)  # type: ignore[no-any-return]

    def load_of(self, counts: Counts) -> tuple[int, ...]:
        return tuple(map(int, counts[len(self.paths) :]))


RegimeOf = Callable[[tuple[int, ...], Rows], str]
"""The fingerprint of whatever has this load, and of which these rows are an example."""


@dataclass(frozen=True, slots=True)
class RoutingPoint:
    """Counts that some routing has and none exceeds."""

    rows: Rows
    """Such a routing."""
    counts: Counts
    """As the columns of ``ExpertCounts``."""
    regime: str


@dataclass(frozen=True, slots=True)
class Kind:
    """Numbers of rows that differ only in how many periods they hold."""

    counts: Counts
    residues: int
    """The numbers of rows in the first period, as a set of ``residues``."""
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class Mixture:
    """How many experts are of each kind."""

    members: tuple[int, ...]
    counts: Counts
    """Together, without whole periods."""
    sums: int
    """What their rows can be together, without whole periods; a set of ``residues``."""

    def routing(self, kinds: Sequence[Kind], total: int, periods: int) -> Rows:
        """One with these rows besides whole periods, all of which the fullest expert gets."""
        sets = [kind.residues for kind, count in zip(kinds, self.members, strict=True) for _ in range(count)]
        first, *others = sorted(chosen(total, sets), reverse=True)
        return (first + periods, *others)


def routings(tokens: int, experts: int, *, at_most: bool = False) -> int:
    """How many ways there are."""
    return comb(tokens + experts, experts) if at_most else comb(tokens + experts - 1, experts - 1)


def pareto_set(
    table: ExpertCounts, experts: int, tokens: int, regime: RegimeOf, *, at_most: bool = False
) -> tuple[RoutingPoint, ...]:
    """For each regime the counts that no routing exceeds, each with a routing that has them.

    The routings are those of ``tokens`` rows, or with ``at_most`` those of fewer, too.
    """
    assert experts > 0, experts
    assert 0 <= tokens <= table.most_rows, f"{tokens} rows, known up to {table.most_rows}"
    period, more = period_of(table)
    kinds = kinds_of(table, period)
    regimes: dict[tuple[int, ...], str] = {}
    found: dict[str, list[_Found]] = defaultdict(list)
    reach = _fewest if at_most else _all_of_them
    for mixture in mixtures(kinds, experts, len(table.paths), reach):
        for rest, periods in _lengths(mixture, tokens, period, at_most=at_most):
            counts = mixture.counts + periods * more
            load = table.load_of(counts)
            if load not in regimes:
                regimes[load] = regime(load, mixture.routing(kinds, rest, periods * period))
            found[regimes[load]].append((counts, mixture, rest, periods * period))
    return tuple(
        RoutingPoint(mixture.routing(kinds, rest, whole), counts, where)
        for where in sorted(found)
        for counts, mixture, rest, whole in _greatest(found[where])
    )


_Found = tuple[Counts, Mixture, int, int]


def _lengths(mixture: Mixture, tokens: int, period: int, *, at_most: bool) -> Iterator[tuple[int, int]]:
    """The rows a mixture may have, besides whole periods, and how many of those."""
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


def _greatest(found: list[_Found]) -> list[_Found]:
    return [found[place] for place in sorted(maximal(np.stack([each[0] for each in found])))]


def period_of(table: ExpertCounts) -> tuple[int, Counts]:
    """The fewest rows that add the same counts wherever they are added, and those counts."""
    counts = table.counts[1:]
    for period in range(1, len(counts) // 2 + 1):
        more = counts[period] - counts[0]
        if (counts[period:] - counts[:-period] == more).all():
            return period, more
    return len(counts), np.zeros_like(counts[0])


def kinds_of(table: ExpertCounts, period: int) -> list[Kind]:
    """The empty expert, then all kinds of others."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rows in range(1, period + 1):
        alike[tuple(table.counts[rows])].append(rows)
    nonempty = [Kind(table.counts[rows[0]], set_of(rows)) for rows in alike.values()]
    return [Kind(table.counts[0], set_of([0]), is_empty=True), *nonempty]


def _all_of_them(sums: int) -> int:
    return sums


def _fewest(sums: int) -> int:
    return sums & -sums


def mixtures(
    kinds: Sequence[Kind], experts: int, loads_from: int, reach: Callable[[int], int]
) -> list[Mixture]:
    """All that no other one makes needless; see [Note: all routings by their mixtures].

    ``reach`` is what matters of the numbers of rows that a mixture can have.
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
        states = _needed(longer, loads_from, reach)
    return states


def _needed(states: Iterable[Mixture], loads_from: int, reach: Callable[[int], int]) -> list[Mixture]:
    alike: dict[tuple[int, int, bytes], list[Mixture]] = defaultdict(list)
    for state in states:
        alike[sum(state.members), reach(state.sums), state.counts[loads_from:].tobytes()].append(state)
    return [
        group[place]
        for group in alike.values()
        for place in (maximal(np.stack([each.counts for each in group])) if len(group) > 1 else [0])
    ]


Loads = Mapping[str, Sequence[str]]
"""For each pass the paths whose counts together are its tiles."""


@dataclass(frozen=True, slots=True)
class Additivity:
    """Which paths add up over experts."""

    adding: tuple[str, ...]
    by_load: tuple[str, ...]
    """Those that do not, and are decided by the tiles of each pass: more tiles, no fewer of them."""
    reason: str = ""
    """Why the routings' counts do not follow from those of single experts; empty if they do."""
    table: ExpertCounts | None = None
    """What a single expert adds, where all is well."""


def alone(rows: int, experts: int) -> Rows:
    """The routing that gives all rows to one expert."""
    return (rows, *[0] * (experts - 1))


def additivity(profiles: Mapping[Rows, ShapeProfile], experts: int, tokens: int, loads: Loads) -> Additivity:
    """``profiles`` hold every ``alone(m, experts)`` up to ``tokens``, and the routings to try the sums on."""
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
    others = tuple(path for path in paths if path not in adding)
    uneven = [name for name, does in zip(loads, adds[len(paths) :], strict=True) if not does]
    if uneven:
        return Additivity(adding, others, f"the tiles of {listed(uneven)} do not add up over experts")
    if reason := _not_by_load(profiles, others, columns, against):
        return Additivity(adding, others, reason)
    kept = np.flatnonzero(adds)
    return Additivity(adding, others, "", ExpertCounts(adding, tuple(loads), single[:, kept]))


class _Columns:
    """A profile as numbers: its paths, then its loads."""

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
    """Why regime or counts do not follow from the load, or nothing."""
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
