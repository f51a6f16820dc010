"""Compares the times of one check, on every rank or on rank 0 alone (paper, sections 5.4 and 6.1.2).

In a job of one group of ranks, every rank receives all times and concludes the same. In a larger one, and
unless every comparison is recorded, rank 0 does so for all. The others only need to know what to time again,
and rank 0 reports what it finds. Looking for slow ranks is about half of rank 0's work in a large job, and no
rank waits for it: a thread does it during the next step.

The votes of a check are in the same message as its times, so that ranks wait for each other once. A rank
sends its *layout*, which says what was timed and is usually the same on many ranks, and its *column* of
numbers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from torchscout.c3.tree import Runs
from torchscout.communicators import Communicators
from torchscout.config import BaselineConfig, StragglerConfig
from torchscout.decision.baseline import Slowness, Stragglers
from torchscout.decision.timings import Calls, Floats, Ints, Timings, Work
from torchscout.mesh import AXES, LayerKind, Mesh
from torchscout.replay.recipe import Measured

__all__ = ["Compared", "TimeComparison", "decode", "encode"]

_FORMAT = 1
_IDENTITY = 4
"""Numbers that identify a process group and its work: first and last member, size, elements."""
_LENGTHS = struct.Struct("<II")
_NOTHING = Slowness([], [])


class Compared(NamedTuple):
    """What all ranks have agreed on after they exchanged times and votes."""

    doubted: set[str]
    """The layers to time again, on all ranks alike; see ``Replayer.doubted``."""
    highest: list[int]
    """The highest of all ranks' votes."""
    is_slow: bool = False
    """Whether there are incidents, which every rank has found. Those that rank 0 finds for all ranks are
    announced in its votes of the next check."""


class TimeComparison:
    """The times of this rank among those of the job."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        communicators: Communicators,
        straggler: StragglerConfig,
        baseline: BaselineConfig,
        *,
        by_all: bool,
        guard: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """``by_all`` if every rank records its comparisons; ``guard`` returns None if a function raises."""
        self._mesh, self._communicators, self._guard = mesh, communicators, guard
        self._by_all = by_all
        self._new_stragglers = partial(Stragglers, mesh, rank, straggler, baseline)
        self._observed: Future[Slowness] | None = None
        self.start_over()

    def start_over(self) -> None:
        """Forget the times of earlier checks."""
        self._stragglers = self._new_stragglers()

    def exchange(
        self, step: int, measured: Sequence[Measured], votes: Sequence[int], *, is_final: bool
    ) -> Compared:
        """Send this rank's times and votes, and return what all ranks have agreed on.

        Unless the times are ``is_final``, those that would be reported as slow are doubted instead, and not
        added to those of earlier checks: the caller measures them again. Every rank makes this call.
        """
        layout, column = encode(measured, self._mesh)
        ballot = np.array(votes, "<i8").tobytes()
        if not self._is_judged_by_all:
            return self._consult(step, (layout, column, ballot), is_final)
        gathered = self._communicators.gather(
            _LENGTHS.pack(len(layout), len(column)) + layout + column + ballot
        )
        parts = zip(*map(_split, gathered), strict=True)
        layouts, columns, ballots = (Runs.joined([Runs.of(each) for each in part]) for part in parts)
        doubted = self._judge(step, layouts, columns, is_final)
        is_slow = self._observed is not None and bool(self._observed.result().incidents)
        return Compared(doubted, _highest(ballots), is_slow)

    def observed(self, *, wait: bool = False) -> Slowness:
        """Return what the latest final times have shown, once. Unless this waits, return nothing while they
        are still compared."""
        if self._observed is None or not (wait or self._observed.done()):
            return _NOTHING
        observed, self._observed = self._observed, None
        return observed.result()

    @property
    def reports_all(self) -> bool:
        """Whether this rank reports every incident that it finds, since no other rank finds any."""
        return not self._is_judged_by_all

    @property
    def _is_judged_by_all(self) -> bool:
        return self._by_all or not self._communicators.is_tree

    def _consult(self, step: int, payloads: Sequence[bytes], is_final: bool) -> Compared:
        """Let rank 0 judge."""

        def answer(received: list[Runs]) -> bytes:
            layouts, columns, ballots = received
            doubted = self._guard(lambda: self._judge(step, layouts, columns, is_final)) or ()
            return json.dumps([[*doubted], _highest(ballots)]).encode()

        doubted, highest = json.loads(self._communicators.consult(payloads, answer))
        return Compared({*doubted}, highest)

    def _judge(self, step: int, layouts: Runs, columns: Runs, is_final: bool) -> set[str]:
        """Return the layers to time again; if there are none, begin to look for what is slow."""
        timings = decode(step, self._mesh, layouts, columns)
        doubted = set[str]() if is_final else self._stragglers.layers_to_time_again(timings)
        if not doubted:
            beside = ThreadPoolExecutor(1, "torchscout-times")
            self._observed = beside.submit(self._stragglers.observe, timings)
            beside.shutdown(wait=False)  # its thread ends when it has finished
        return doubted


def _split(payload: bytes) -> tuple[bytes, bytes, bytes]:
    first, second = _LENGTHS.unpack_from(payload)
    begin, middle, end = _LENGTHS.size, _LENGTHS.size + first, _LENGTHS.size + first + second
    return payload[begin:middle], payload[middle:end], payload[end:]


def _highest(ballots: Runs) -> list[int]:
    rows = np.frombuffer(ballots.payloads, "<i8").reshape(len(ballots.lengths), -1)
    highest: list[int] = rows.max(axis=0).tolist()
    return highest


def encode(measured: Sequence[Measured], mesh: Mesh) -> tuple[bytes, bytes]:
    """Return the layout and the column of one rank's times.

    Members of a process group are left out: the ranks that send times of a group are its members.
    """
    layout: list[object] = [_FORMAT]
    column: list[float] = []
    for each in measured:
        laps = [[lap.surface, _axis_of(mesh, lap.members), len(lap.milliseconds)] for lap in each.laps]
        layout.append([each.layer, [*each.shape], [*each.times], laps])
        column += each.times.values()
        for lap in each.laps:
            members = lap.members
            column += (min(members), max(members), len(members), lap.elements, *lap.milliseconds)
    return json.dumps(layout).encode(), np.array(column, "<f8").tobytes()


def decode(step: int, mesh: Mesh, layouts: Runs, columns: Runs) -> Timings:
    """Decode what all ranks have sent. Raises ``ValueError`` if a column does not have its layout."""
    ranks: dict[bytes, list[Ints]] = {}
    first = 0
    for count, layout in zip(layouts.counts.tolist(), _payloads(layouts), strict=True):
        ranks.setdefault(layout, []).append(np.arange(first, first + count))
        first += count
    run_of = np.repeat(np.arange(len(columns.counts)), columns.counts)
    sizes = columns.lengths.astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    numbers = np.frombuffer(columns.payloads, "<f8")
    timings = Timings(step, mesh)
    for layout, parts in ranks.items():
        version, *described = json.loads(layout)
        if version != _FORMAT:
            raise ValueError(f"a rank sent times in format {version}, but this one uses {_FORMAT}")
        members = np.concatenate(parts)
        width = sum(len(each[2]) + sum(_IDENTITY + lap[2] for lap in each[3]) for each in described)
        runs = run_of[members]
        if wrong := sizes[runs][sizes[runs] != 8 * width].tolist():
            raise ValueError(f"{len(wrong)} of {len(members)} ranks sent {wrong[0]} bytes for {width} times")
        if width:
            rows = np.lib.stride_tricks.sliding_window_view(numbers, width)[begins[runs] // 8]
            _add(timings, described, members, rows)
    return timings


def _add(timings: Timings, described: Sequence[Any], ranks: Ints, rows: Floats) -> None:
    """Add the times of ranks with the same layout."""
    place = 0
    for layer, shape, surfaces, laps in described:
        for surface in surfaces:
            timings.add(Work(surface, layer, tuple(shape)), ranks, rows[:, place])
            place += 1
        for surface, axis, count in laps:
            groups = rows[:, place : place + _IDENTITY].astype(np.int64)
            times = rows[:, place + _IDENTITY : place + _IDENTITY + count]
            timings.add_collectives(Calls(surface, axis, layer, tuple(shape), count), ranks, groups, times)
            place += _IDENTITY + count


def _payloads(runs: Runs) -> Iterator[bytes]:
    start = 0
    for length in runs.lengths.tolist():
        yield runs.payloads[start : start + length]
        start += length


@lru_cache(maxsize=256)
def _axis_of(mesh: Mesh, members: tuple[int, ...]) -> str:
    """Return the mesh axis of a process group, of dense layers or of experts.

    For a group over several axes, or a part of one, these are the axes along which its members differ.
    """
    members = tuple(sorted(members))
    along = (
        axis for role in LayerKind for axis in AXES if mesh.ranks_along(axis, members[0], role) == members
    )
    return next(along, None) or "+".join(mesh.axes_across(members, LayerKind.DENSE))
