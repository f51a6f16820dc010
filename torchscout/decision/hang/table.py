"""The reports of one round as columns (paper, section 7).

A round of a large job has millions of operations. They are kept by *row*: one for each line of each rank,
with what the rank has issued on that line, and its last operations there, oldest first. Most questions are
about rows, and the operations of few rows are looked at one by one. ``table_of`` makes a table from the
statuses of ranks; hubs make it from the posts of observers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchscout.decision.progress import CommGroup, IssuedOp, Process, Progress, RankStatus

__all__ = [
    "NOTHING",
    "Bools",
    "Hashes",
    "Ints",
    "Lines",
    "RoundTable",
    "Rows",
    "ordered",
    "spans",
    "table_of",
]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

NOTHING = -1
"""Stands for None in a column."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of unequal length, one after the other."""

    values: Ints
    starts: Ints
    """The start of each row, and the end of the last one."""

    @classmethod
    def grouped(cls, rows: Ints, values: Ints, count: int) -> Rows:
        """Put each value into its row, of ``count`` rows, in the given order."""
        starts = np.append(0, np.cumsum(np.bincount(rows, minlength=count)))
        return cls(values[ordered(rows)], starts)

    def __getitem__(self, row: int) -> Ints:
        return self.values[self.starts[row] : self.starts[row + 1]]

    def take(self, rows: Ints) -> Ints:
        """Return the values of some rows."""
        return self.values[spans(self.starts[rows], self.lengths[rows])[0]]

    @property
    def lengths(self) -> Ints:
        return np.diff(self.starts)


def spans(starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Return all indices of some spans, and for each of them which span it is in."""
    which = np.repeat(np.arange(len(starts)), lengths)
    before = np.cumsum(lengths) - lengths
    return np.arange(len(which)) + (starts - before)[which], which


def ordered(values: Ints) -> Ints:
    """Return the order that sorts numbers from 0 to 2**32, equal ones as they come.

    NumPy sorts numbers of 16 bits without comparing them, several times as fast as larger ones.
    """
    order = np.argsort(values.astype(np.uint16), kind="stable")
    if values.max(initial=0) >> 16:
        order = order[np.argsort((values[order] >> 16).astype(np.uint16), kind="stable")]
    return order


class Lines(Mapping[str, CommGroup]):
    """The lines of a job with more than one member, by key and by index; a group of one waits for nobody."""

    def __init__(self, lines: Iterable[CommGroup]) -> None:
        known = [line for line in lines if len(line.members) > 1]
        self._known = known
        self._index = {line.key: index for index, line in enumerate(known)}
        sizes = [len(line.members) for line in known]
        ranks = np.fromiter((rank for line in known for rank in line.members), np.int64, sum(sizes))
        self.members = Rows(ranks, np.cumsum([0, *sizes]))

    def at(self, index: int) -> CommGroup:
        return self._known[index]

    def index(self, key: str) -> int:
        """Return ``NOTHING`` for a line that is not known."""
        return self._index.get(key, NOTHING)

    def __getitem__(self, key: str) -> CommGroup:
        if (index := self.index(key)) == NOTHING:
            raise KeyError(key)
        return self.at(index)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.index(key) != NOTHING

    def __iter__(self) -> Iterator[str]:
        return (self.at(index).key for index in range(len(self)))

    def __len__(self) -> int:
        return len(self.members.starts) - 1


@dataclass(frozen=True, slots=True, eq=False)
class RoundTable:
    """One round: columns by rank that answered, by row, and by operation."""

    statuses: Mapping[int, RankStatus]
    """The same as objects, which may have to be read first."""
    lines: Lines

    rank: Ints
    running: Bools
    waiting: Ints
    """1 or 0 according to the stack; ``NOTHING`` without a stack."""
    published: Bools
    """Whether the rank has published progress; zeros follow if not."""
    step: Ints
    operation: Ints
    at_communication: Bools
    silent_seconds: npt.NDArray[np.float64]
    device_step: Ints
    """``NOTHING`` if unknown."""
    device_busy: Ints
    """1 or 0; ``NOTHING`` if unknown."""
    captured: Bools
    """Whether CUDA graphs have captured operations of the rank."""

    row_rank: Ints
    """Ascending."""
    row_line: Ints
    """``NOTHING`` for a line that is not known."""
    issued: Ints
    entered: Ints
    """The last operation that the rank's device has reached; ``NOTHING`` if the host itself enters
    operations, or if unknown."""
    has_splits: Bools
    starts: Ints
    """The first operation of each row, and the end of the last row."""

    digest: Hashes
    age: npt.NDArray[Any]
    """How many operations of the same row's line the rank has issued since."""
    order: npt.NDArray[Any]
    """Its place among all operations of the rank."""
    fingerprints: Callable[[Ints], Hashes]
    """The fingerprints of some operations."""

    def row_of(self, operations: Ints) -> Ints:
        return np.searchsorted(self.starts, operations, side="right") - 1

    def numbers(self, operations: Ints, rows: Ints) -> Ints:
        """Return the numbers of operations in these rows."""
        found: Ints = self.issued[rows] - self.age[operations]
        return found

    def expanded(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return all operations of some rows, and the row of each."""
        operations, which = spans(self.starts[rows], self.starts[rows + 1] - self.starts[rows])
        return operations, rows[which]

    def issued_op(self, operation: int) -> IssuedOp:
        """Return one operation as an object."""
        row = int(self.row_of(np.array([operation]))[0])
        key = self.lines.at(int(self.row_line[row])).key
        number = int(self.issued[row]) - int(self.age[operation])
        progress = self.statuses[int(self.row_rank[row])].progress
        assert progress is not None
        # Found by its place: a damaged report may call the line by another key than other members do.
        rows = [np.searchsorted(self.row_rank, self.row_rank[row], side) for side in ("left", "right")]
        begin, end = self.starts[rows].tolist()
        place: int = np.argsort(self.order[begin:end], kind="stable").tolist().index(operation - begin)
        return replace(progress.recent[place], line=key, number=number)


class _Row(NamedTuple):
    rank: int
    line: int
    issued: int
    entered: int
    operations: Sequence[tuple[int, IssuedOp]]
    """Each with its place among all operations of the rank."""


def table_of(statuses: Mapping[int, RankStatus], lines: Mapping[str, CommGroup]) -> RoundTable:
    """Return the table of these statuses."""
    known = Lines(lines.values())
    ordered = [statuses[rank] for rank in sorted(statuses)]
    maybe = [each.progress for each in ordered]
    rows = [row for progress in maybe if progress is not None for row in _rows(progress, known)]
    shown = [(order, each, row.issued) for row in rows for order, each in row.operations]
    fingerprint = np.array([each.fingerprint & _ALL_BITS for _, each, _ in shown], np.uint64)
    return RoundTable(
        statuses=statuses,
        lines=known,
        rank=_ints(each.rank for each in ordered),
        running=np.array([each.process is Process.RUNNING for each in ordered], bool),
        waiting=_ints(each.waiting for each in ordered),
        published=np.array([each is not None for each in maybe], bool),
        step=_ints(0 if each is None else each.step for each in maybe),
        operation=_ints(0 if each is None else each.operation for each in maybe),
        at_communication=np.array([each is not None and each.at_communication for each in maybe], bool),
        silent_seconds=np.array([0 if each is None else each.silent_seconds for each in maybe], float),
        device_step=_ints(None if each is None else each.device_step for each in maybe),
        device_busy=_ints(None if each is None else each.device_busy for each in maybe),
        captured=np.array([each is not None and each.captured > 0 for each in maybe], bool),
        row_rank=_ints(row.rank for row in rows),
        row_line=_ints(row.line for row in rows),
        issued=_ints(row.issued for row in rows),
        entered=_ints(row.entered for row in rows),
        has_splits=np.array(
            [any(each.sends is not None for _, each in row.operations) for row in rows], bool
        ),
        starts=np.cumsum([0, *(len(row.operations) for row in rows)]),
        digest=np.array([each.digest & _ALL_BITS for _, each, _ in shown], np.uint64),
        age=_ints(issued - each.number for _, each, issued in shown),
        order=_ints(order for order, _, _ in shown),
        fingerprints=fingerprint.__getitem__,
    )


_ALL_BITS = (1 << 64) - 1


def _rows(progress: Progress, lines: Lines) -> Iterator[_Row]:
    shown: dict[str, list[tuple[int, IssuedOp]]] = {}
    for order, each in enumerate(progress.recent):
        shown.setdefault(each.line, []).append((order, each))
    for key in {**progress.issued, **progress.entered, **shown}:
        issued, entered = progress.issued.get(key, 0), progress.entered.get(key, NOTHING)
        yield _Row(progress.rank, lines.index(key), issued, entered, shown.get(key, ()))


def _ints(values: Iterable[int | None]) -> Ints:
    return np.array([NOTHING if each is None else int(each) for each in values], np.int64)
