"""Finds the fewest expert shapes that cover the execution paths of all admitted ones (paper, section 6.2).

A profiler executes each shape several times (``observe``) and returns a ``ShapeProfile``. A shape whose
executions differ has no profile, and is retained. ``tabulated`` finds the representatives of all other shapes
and verifies that they cover them. Nothing here uses a device.
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
    "CoverCheck",
    "Observed",
    "Profiler",
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
"""The number of rows of each expert in one execution of the kernel."""


@dataclass(frozen=True, slots=True)
class ShapeProfile:
    """Fingerprint *F* and path counts *c* of one shape, as in the paper."""

    fingerprint: str
    """Canonical text: equal for the same kernel, configuration, schedule and pressure regime."""
    path_counts: tuple[tuple[str, int], ...]
    """How often each execution path ran, sorted by path, without paths that did not run."""

    def __post_init__(self) -> None:
        counts = dict(self.path_counts)
        assert len(counts) == len(self.path_counts), f"a path is listed twice: {self.path_counts}"
        assert all(count >= 0 for count in counts.values()), f"a count is negative: {counts}"
        ran = tuple(sorted((path, count) for path, count in counts.items() if count))
        object.__setattr__(self, "path_counts", ran)  # makes profiles of equal executions equal

    @classmethod
    def of(cls, fingerprint: str, counts: Mapping[str, int]) -> ShapeProfile:
        return cls(fingerprint, tuple(counts.items()))

    def covers(self, other: ShapeProfile) -> bool:
        """Whether every path of ``other`` runs here in the same regime, at least as often."""
        if self.fingerprint != other.fingerprint:
            return False
        here = dict(self.path_counts)
        return all(here.get(path, 0) >= count for path, count in other.path_counts)

    @property
    def occurrences(self) -> int:
        """The sum of all counts."""
        return sum(count for _, count in self.path_counts)


class Profiler(Protocol):
    """Runs the production expert implementation and counts its execution paths."""

    def facts(self) -> Mapping[str, str]:
        """Return what determines which kernel runs, such as device, versions, dimensions and dtype.

        Called before the first shape; never changes.
        """
        ...

    def profile(self, rows: Rows) -> ShapeProfile | None:
        """Execute all passes of this shape once. Called several times for each shape.

        Return None if its paths cannot be counted; an optional attribute ``reason`` then has the reason.
        """
        ...


def uniform(rows: int, experts: int) -> Rows:
    """Return the shape with the same number of rows for each expert."""
    return (rows,) * experts


EXECUTIONS = 3
"""Times each shape is executed."""

_UNCOUNTED = "its paths cannot be counted here"


@dataclass(frozen=True, slots=True)
class Observed:
    """The profile of one shape, or why it has none."""

    rows: Rows
    profile: ShapeProfile | None
    """The profile of every execution; None if it is unknown or unstable."""
    reason: str = ""
    """Why there is none."""

    def __post_init__(self) -> None:
        assert (self.profile is None) == bool(self.reason), "either a profile or a reason"


def observe(profiler: Profiler, rows: Rows) -> Observed:
    """Execute this shape ``EXECUTIONS`` times, or until its profile is known to be unstable."""
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
    """Return the profiles of shapes that have one."""
    return {each.rows: each.profile for each in seen if each.profile is not None}


def unknown(seen: Iterable[Observed]) -> dict[Rows, str]:
    """Return the shapes without a profile, with the reasons."""
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
    return f"execution {execution} had different counts, {listed(changed)}"


# [Note: the minimum cover needs no search]
#
# Covering is reflexive and transitive, and two shapes that cover each other have the same profile, so it is a
# partial order on distinct profiles. There are finitely many, so each profile is covered by a maximal one,
# and the maximal ones together cover everything. Only itself covers a maximal profile, so every cover
# contains a shape of each maximal profile, and different profiles need different shapes. One shape for each
# maximal profile is therefore a minimum cover, and the only one except for the choice among shapes of equal
# profile.


def minimum_cover(profiles: Mapping[Rows, ShapeProfile]) -> tuple[Rows, ...]:
    """Return the smallest shape of each maximal profile; see [Note: the minimum cover needs no search]."""
    smallest: dict[ShapeProfile, Rows] = {}
    for rows in sorted(profiles, key=by_size):
        smallest.setdefault(profiles[rows], rows)
    alike: dict[str, list[ShapeProfile]] = defaultdict(list)
    for profile in smallest:
        alike[profile.fingerprint].append(profile)
    kept = [smallest[group[place]] for group in alike.values() for place in maximal(_table(group))]
    return tuple(sorted(kept, key=by_size))


def by_size(rows: Rows) -> tuple[int, Rows]:
    """Sort key of shapes: fewest rows in total, then fewest of the first expert, and so on."""
    return sum(rows), rows


def maximal(counts: NDArray[np.int64]) -> list[int]:
    """Return the places of rows that no other row equals or exceeds in every column; rows are distinct."""
    # A row that exceeds another one has a larger sum, so each row is compared only with those kept before it.
    order = np.argsort(-counts.sum(axis=1), kind="stable")
    kept = np.empty_like(counts)
    places: list[int] = []
    for place in order:
        if not (kept[: len(places)] >= counts[place]).all(axis=1).any():
            kept[len(places)] = counts[place]
            places.append(int(place))
    return places


def _table(profiles: Sequence[ShapeProfile]) -> NDArray[np.int64]:
    """Return a row for each profile, with a column for each path of any of them."""
    paths = {path: None for profile in profiles for path, _ in profile.path_counts}
    column = {path: place for place, path in enumerate(paths)}
    table = np.zeros((len(profiles), len(paths)), dtype=np.int64)
    for row, profile in enumerate(profiles):
        for path, count in profile.path_counts:
            table[row, column[path]] = count
    return table


@dataclass(frozen=True, slots=True)
class CoverCheck:
    """What a set of representatives covers."""

    admitted: int
    """Number of shapes that were checked."""
    uncovered: tuple[Rows, ...]
    """Shapes that no single representative covers."""
    occurrences: int
    """Executions of all paths by all shapes: the n-th execution of a path in a shape is one occurrence."""
    covered: int
    """Occurrences for which a representative runs that path, in that regime, at least n times."""
    redundant: tuple[Rows, ...]
    """Representatives that another one covers. If there are none, no smaller cover exists."""

    @property
    def complete(self) -> bool:
        return not self.uncovered and self.covered == self.occurrences


def check_cover(profiles: Mapping[Rows, ShapeProfile], representatives: Iterable[Rows]) -> CoverCheck:
    """Check every admitted shape against the representatives, independently of how they were found."""
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
class Table:
    """The representatives of all admitted shapes of one projection."""

    name: str
    """Name of the projection, such as ``6144x10752``."""
    facts: Mapping[str, str]
    """The profiler's facts about device, software, kernel and dimensions."""
    domain: str
    """The admitted shapes in words."""
    admitted: int
    """Number of admitted shapes."""
    selected: tuple[Observed, ...]
    """The minimum cover of shapes with a profile."""
    retained: tuple[Observed, ...]
    """All shapes without a profile."""
    occurrences: int
    """Executions of all paths by all shapes with a profile."""
    covered: int
    """Occurrences that a representative covers."""

    @property
    def representatives(self) -> tuple[Rows, ...]:
        """All shapes to replay, smallest first."""
        shapes = [each.rows for each in self.selected] + [each.rows for each in self.retained]
        return tuple(sorted(shapes, key=by_size))


def tabulated(name: str, facts: Mapping[str, str], domain: str, seen: Iterable[Observed]) -> Table:
    """Return a verified minimum cover of the observed shapes."""
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
        selected=tuple(Observed(rows, profiles[rows]) for rows in chosen),
        retained=tuple(Observed(rows, None, reasons[rows]) for rows in sorted(reasons, key=by_size)),
        occurrences=check.occurrences,
        covered=check.covered,
    )
