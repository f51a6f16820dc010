"""The times of replays on one rank, and the binary form in which ranks exchange them (paper, section 5.4).

A rank sends its *layout*, which says what was timed and is usually the same on many ranks, and its *column*
of numbers. The columns of ranks with one layout form a table, which is compared without an object for each
rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchscout.c3.tree import Runs
from torchscout.decision.types import Surface
from torchscout.mesh import AXES, LayerKind, Mesh

__all__ = ["Lap", "Measured", "Table", "TimedLap", "TimedWork", "axis_of", "encode", "tables"]

_FORMAT = 1
_IDENTITY = 4
"""Numbers that identify a process group and its work: first and last member, size, elements."""


@dataclass(frozen=True, slots=True)
class Lap:
    """The collectives of one kind that one replay made on one process group."""

    surface: Surface
    """Ends in ``@`` for the collectives of a module, whose surfaces get the axis of the group."""
    members: tuple[int, ...]
    elements: int
    milliseconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of one replay on this rank."""

    layer: str
    shape: tuple[int, ...]
    """The size of the work."""
    times: Mapping[Surface, float]
    laps: Sequence[Lap]


def encode(measured: Sequence[Measured], mesh: Mesh) -> tuple[bytes, bytes]:
    """Return the layout and the column of one rank's times.

    Members of a process group are left out: the ranks that send times of a group are its members.
    """
    layout: list[object] = [_FORMAT]
    column: list[float] = []
    for each in measured:
        laps = [[lap.surface, axis_of(mesh, lap.members), len(lap.milliseconds)] for lap in each.laps]
        layout.append([each.layer, list(each.shape), list(each.times), laps])
        column += each.times.values()
        for lap in each.laps:
            members = lap.members
            column += (min(members), max(members), len(members), lap.elements, *lap.milliseconds)
    return json.dumps(layout).encode(), np.array(column, "<f8").tobytes()


class TimedLap(NamedTuple):
    """The collectives of one kind in a layout."""

    surface: Surface
    axis: str
    start: int
    """Where its numbers start in the column: its identity, then the milliseconds of each call."""
    calls: int

    def identity(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return first and last member, size and elements, for each rank of a table."""
        return values[:, self.start : self.start + _IDENTITY].astype(np.int64)

    def milliseconds(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the time of each call, for each rank of a table."""
        start = self.start + _IDENTITY
        return values[:, start : start + self.calls]


class TimedWork(NamedTuple):
    """One replay in a layout."""

    layer: str
    shape: tuple[int, ...]
    times: Mapping[Surface, int]
    """Where each time is in the column."""
    laps: Sequence[TimedLap]


@dataclass(frozen=True, slots=True)
class Table:
    """The times of ranks with the same layout."""

    ranks: npt.NDArray[np.int64]
    work: Sequence[TimedWork]
    values: npt.NDArray[np.float64]
    """One row for each rank."""


def tables(layouts: Runs, columns: Runs) -> list[Table]:
    """Decode what all ranks have sent. Raises ``ValueError`` if a column does not have its layout."""
    ranks: dict[bytes, list[tuple[int, int]]] = {}
    by_run = zip(layouts.counts.tolist(), _payloads(layouts), strict=True)
    rank = 0
    for count, layout in by_run:
        ranks.setdefault(layout, []).append((rank, rank + count))
        rank += count
    run_of = np.repeat(np.arange(len(columns.counts)), columns.counts)
    sizes = columns.lengths.astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    numbers = np.frombuffer(columns.payloads, "<f8")
    found: list[Table] = []
    for layout, spans in ranks.items():
        work, width = _work(layout)
        members = np.concatenate([np.arange(*span) for span in spans])
        runs = run_of[members]
        if wrong := sizes[runs][sizes[runs] != 8 * width].tolist():
            raise ValueError(f"{len(wrong)} of {len(members)} ranks sent {wrong[0]} bytes for {width} times")
        rows = np.lib.stride_tricks.sliding_window_view(numbers, width)[begins[runs] // 8]
        found.append(Table(members, work, rows))
    return found


def _payloads(runs: Runs) -> Iterator[bytes]:
    start = 0
    for length in runs.lengths.tolist():
        yield runs.payloads[start : start + length]
        start += length


def _work(layout: bytes) -> tuple[list[TimedWork], int]:
    version, *described = json.loads(layout)
    if version != _FORMAT:
        raise ValueError(f"a rank sent times in format {version}, but this one uses {_FORMAT}")
    work: list[TimedWork] = []
    width = 0
    for layer, shape, surfaces, timed in described:
        times = {surface: width + place for place, surface in enumerate(surfaces)}
        width += len(surfaces)
        laps: list[TimedLap] = []
        for surface, axis, calls in timed:
            laps.append(TimedLap(surface, axis, width, calls))
            width += _IDENTITY + calls
        work.append(TimedWork(layer, tuple(shape), times, laps))
    return work, width


@lru_cache(maxsize=256)
def _axis_of(mesh: Mesh, members: tuple[int, ...]) -> str:
    along = (
        axis for role in LayerKind for axis in AXES if mesh.ranks_along(axis, members[0], role) == members
    )
    return next(along, None) or "+".join(mesh.axes_across(members, LayerKind.DENSE))


def axis_of(mesh: Mesh, members: Sequence[int]) -> str:
    """Return the mesh axis of a process group, of dense layers or of experts.

    For a group over several axes, or a part of one, these are the axes along which its members differ.
    """
    return _axis_of(mesh, tuple(sorted(members)))
