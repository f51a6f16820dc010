"""The fewest expert shapes whose execution paths cover those of every admitted shape (paper, section 6.2).

A profiler executes each shape several times (``observe``) and returns a ``ShapeProfile``. A shape that did
not do the same each time has no profile, and is retained by itself. ``tabulated`` finds the
representatives of all others and proves that they cover them. Nothing here touches a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from torchscout.utils.text import listed

__all__ = [
    "EXECUTIONS",
    "CoverCheck",
    "Observed",
    "Profiler",
    "Representative",
    "Retained",
    "Rows",
    "ShapeProfile",
    "Table",
    "by_size",
    "check_cover",
    "known",
    "maximal",
    "minimum_cover",
    "observe",
    "tabulated",
    "uniform",
    "unknown",
]

Rows = tuple[int, ...]
"""The rows of each expert in one execution of the kernel."""


@dataclass(frozen=True, slots=True)
class ShapeProfile:
    """The paper's F and c of one shape."""

    fingerprint: str
    """Canonical text: equal text is the same kernel, configuration, schedule and pressure regime."""
    path_counts: tuple[tuple[str, int], ...]
    """How often each execution path ran, sorted by path; a path that never ran is not listed."""

    def __post_init__(self) -> None:
        counts = dict(self.path_counts)
        assert len(counts) == len(self.path_counts), f"a path is listed twice: {self.path_counts}"
        assert all(count >= 0 for count in counts.values()), f"a path ran less than never: {counts}"
        ran = tuple(sorted((path, count) for path, count in counts.items() if count))
        object.__setattr__(self, "path_counts", ran)  # equal executions are equal profiles, however listed

    @classmethod
    def of(cls, fingerprint: str, counts: Mapping[str, int]) -> ShapeProfile:
        return cls(fingerprint, tuple(counts.items()))

    def covers(self, other: ShapeProfile) -> bool:
        """Whether every path that ``other`` takes is taken here in the same regime, at least as often."""
        if self.fingerprint != other.fingerprint:
            return False
        here = dict(self.path_counts)
        return all(here.get(path, 0) >= count for path, count in other.path_counts)

    @property
    def occurrences(self) -> int:
        """Times that any path ran."""
        return sum(count for _, count in self.path_counts)


class Profiler(Protocol):
    """Runs the production expert implementation and sees what it does."""

    def facts(self) -> Mapping[str, str]:
        """What decides which kernel runs: device, driver, versions, kernel source, dimensions, dtype.

        Called before the first shape; the same answer as long as the profiler lives.
        """
        ...

    def profile(self, rows: Rows) -> ShapeProfile | None:
        """Execute this shape once: forward, input gradient, weight gradient.

        Called several times for each shape. None where the paths taken cannot be counted; an attribute
        ``reason``, where a profiler has one, then says why.
        """
        ...


def uniform(rows: int, experts: int) -> Rows:
    """The shape that gives each expert the same number of rows."""
    return (rows,) * experts


EXECUTIONS = 3
"""Times each shape is executed."""

_UNCOUNTED = "its paths cannot be counted here"


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of one shape: its profile, or why it has none that can be relied on."""

    rows: Rows
    profile: ShapeProfile | None
    """The one that every execution gave; None if it is unknown or unstable."""
    reason: str = ""
    """Why there is none; such a shape stands for itself."""

    def __post_init__(self) -> None:
        assert (self.profile is None) == bool(self.reason), "no profile without a reason, nor the reverse"


def observe(profiler: Profiler, rows: Rows) -> Observed:
    """Execute this shape until its profile is known or can no longer be."""
    first = profiler.profile(rows)
    for execution in range(2, EXECUTIONS + 1):
        if first is None:
            break
        again = profiler.profile(rows)
        if again is None:
            return Observed(rows, None, f"unstable: execution {execution} could not be counted")
        if again != first:
            return Observed(rows, None, f"unstable: {_difference(first, again, execution)}")
    if first is None:
        return Observed(rows, None, f"unknown: {getattr(profiler, 'reason', '') or _UNCOUNTED}")
    return Observed(rows, first)


def known(seen: Iterable[Observed]) -> dict[Rows, ShapeProfile]:
    """The shapes that may stand for others, or be stood for."""
    return {each.rows: each.profile for each in seen if each.profile is not None}


def unknown(seen: Iterable[Observed]) -> dict[Rows, str]:
    """The shapes that must all be retained, and why."""
    return {each.rows: each.reason for each in seen if each.profile is None}


def _difference(first: ShapeProfile, again: ShapeProfile, execution: int) -> str:
    if first.fingerprint != again.fingerprint:
        return f"execution {execution} ran as {again.fingerprint!r}, the first as {first.fingerprint!r}"
    before, after = dict(first.path_counts), dict(again.path_counts)
    changed = [
        f"{path} {before.get(path, 0)} times and then {after.get(path, 0)}"
        for path in sorted({*before, *after})
        if before.get(path, 0) != after.get(path, 0)
    ]
    return f"in execution {execution} other counts, {listed(changed)}"


# [Note: the minimum cover needs no search]
#
# Covering is reflexive and transitive, and two shapes that cover each other have the same profile: on
# distinct profiles it is a partial order. There are finitely many, so above each profile lies a maximal one,
# and the maximal ones together cover everything. A maximal profile is covered by itself alone, so every cover
# contains, for each maximal profile, a shape that has it; different profiles need different shapes. A cover
# therefore has at least as many shapes as there are maximal profiles, and one shape for each of them is a
# cover: a minimum one, and the only one but for the choice between shapes of equal profile.


def minimum_cover(profiles: Mapping[Rows, ShapeProfile]) -> tuple[Rows, ...]:
    """One shape for each maximal profile: the smallest that has it; see [Note: the minimum cover ...]."""
    smallest: dict[ShapeProfile, Rows] = {}
    for rows in sorted(profiles, key=by_size):
        smallest.setdefault(profiles[rows], rows)
    alike: dict[str, list[ShapeProfile]] = defaultdict(list)
    for profile in smallest:
        alike[profile.fingerprint].append(profile)
    kept = [smallest[group[place]] for group in alike.values() for place in maximal(_table(group))]
    return tuple(sorted(kept, key=by_size))


def by_size(rows: Rows) -> tuple[int, Rows]:
    """The order of shapes: fewest rows in all, then fewest in the first expert, and so on."""
    return sum(rows), rows


def maximal(counts: NDArray[np.int64]) -> list[int]:
    """The places of those rows that no other row equals or exceeds in every column; rows are distinct."""
    # Whoever exceeds a row has a larger sum, so each row need be held only against those kept before it.
    order = np.argsort(-counts.sum(axis=1), kind="stable")
    kept = np.empty_like(counts)
    places: list[int] = []
    for place in order:
        if not (kept[: len(places)] >= counts[place]).all(axis=1).any():
            kept[len(places)] = counts[place]
            places.append(int(place))
    return places


def _table(profiles: Sequence[ShapeProfile]) -> NDArray[np.int64]:
    """A row for each profile, a column for each path that any of them takes."""
    paths = {path: None for profile in profiles for path, _ in profile.path_counts}
    column = {path: place for place, path in enumerate(paths)}
    table = np.zeros((len(profiles), len(paths)), dtype=np.int64)
    for row, profile in enumerate(profiles):
        for path, count in profile.path_counts:
            table[row, column[path]] = count
    return table


@dataclass(frozen=True, slots=True)
class CoverCheck:
    """What a set of representatives covers, counted shape by shape."""

    admitted: int
    """Shapes that were held against the representatives."""
    uncovered: tuple[Rows, ...]
    """Those that no single representative covers."""
    occurrences: int
    """Executions of any path by any admitted shape: the n-th one of a path in a shape is one occurrence."""
    covered: int
    """Occurrences for which some representative takes that path, in that regime, at least n times."""
    redundant: tuple[Rows, ...]
    """Representatives that another one covers; without any the representatives are as few as can be."""

    @property
    def complete(self) -> bool:
        return not self.uncovered and self.covered == self.occurrences


def check_cover(profiles: Mapping[Rows, ShapeProfile], representatives: Iterable[Rows]) -> CoverCheck:
    """Hold every admitted shape against the representatives, knowing nothing of how they were found."""
    shapes = list(representatives)
    chosen = [profiles[rows] for rows in shapes]
    most: dict[tuple[str, str], int] = defaultdict(int)
    for profile in chosen:
        for path, count in profile.path_counts:
            most[profile.fingerprint, path] = max(most[profile.fingerprint, path], count)
    uncovered, covered = [], 0
    for rows, profile in profiles.items():
        if not any(each.covers(profile) for each in chosen):
            uncovered.append(rows)
        here = profile.fingerprint
        covered += sum(min(count, most.get((here, path), 0)) for path, count in profile.path_counts)
    redundant = tuple(
        rows
        for place, rows in enumerate(shapes)
        if any(other.covers(profiles[rows]) for at, other in enumerate(chosen) if at != place)
    )
    occurrences = sum(profile.occurrences for profile in profiles.values())
    return CoverCheck(len(profiles), tuple(uncovered), occurrences, covered, redundant)


@dataclass(frozen=True, slots=True)
class Representative:
    """A shape that stands for all those it covers."""

    rows: Rows
    profile: ShapeProfile


@dataclass(frozen=True, slots=True)
class Retained:
    """A shape that stands only for itself, because nothing reliable is known of what it does."""

    rows: Rows
    reason: str


@dataclass(frozen=True, slots=True)
class Table:
    """All admitted shapes of one projection, compressed."""

    name: str
    """Of the projection, such as ``6144x10752``."""
    facts: Mapping[str, str]
    """What the profiler said of device, software, kernel and dimensions."""
    domain: str
    """The admitted shapes in words."""
    admitted: int
    """How many they are."""
    selected: tuple[Representative, ...]
    """The minimum cover of those whose profile is known."""
    retained: tuple[Retained, ...]
    """All the others."""
    occurrences: int
    """Executions of any path by any shape whose profile is known."""
    covered: int
    """Those of them that a representative repeats."""

    @property
    def representatives(self) -> tuple[Rows, ...]:
        """Every shape that has to be replayed, smallest first."""
        shapes = [each.rows for each in self.selected] + [each.rows for each in self.retained]
        return tuple(sorted(shapes, key=by_size))


def tabulated(name: str, facts: Mapping[str, str], domain: str, seen: Iterable[Observed]) -> Table:
    """Compress what was seen; whether the result covers it is checked, not believed."""
    seen = list(seen)
    profiles, reasons = known(seen), unknown(seen)
    assert len(profiles) + len(reasons) == len(seen), "a shape was observed twice"
    chosen = minimum_cover(profiles)
    check = check_cover(profiles, chosen)
    assert check.complete, f"not covered: {check.uncovered}"
    assert not check.redundant, f"covered by others: {check.redundant}"
    return Table(
        name=name,
        facts=dict(facts),
        domain=domain,
        admitted=len(seen),
        selected=tuple(Representative(rows, profiles[rows]) for rows in chosen),
        retained=tuple(Retained(rows, reasons[rows]) for rows in sorted(reasons, key=by_size)),
        occurrences=check.occurrences,
        covered=check.covered,
    )
