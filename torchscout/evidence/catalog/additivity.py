"""Whether path counts add up over the experts of a kernel, by measurement (beyond the paper's section 6.2).

A path adds up if its count in every routing that was executed is the sum of what each expert does alone. What
does not add up must follow from the load. Pure: the executions are given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torchscout.decision.wording import listed
from torchscout.evidence.catalog.profile import Rows, ShapeProfile
from torchscout.evidence.catalog.routing import Counts, ExpertCounts

__all__ = ["Additivity", "Loads", "additivity", "alone"]

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
