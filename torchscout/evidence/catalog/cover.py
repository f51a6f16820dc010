"""The fewest shapes whose execution paths cover every admitted shape (paper, section 6.2, shape coverage).

Profiles come from ``observed``; shapes without one have no place here, they are all retained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchscout.evidence.catalog.profile import Rows, ShapeProfile

__all__ = ["CoverCheck", "by_size", "check_cover", "maximal", "minimum_cover"]

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
