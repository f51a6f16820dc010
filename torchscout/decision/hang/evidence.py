"""What the ranks reported in one round of the observers, as columns (paper, section 7).

``StatusColumns`` holds all reports as arrays, so that a diagnosis costs little per rank. Ranks, lines and
operations are indices into them; a rank that has not answered, or not published, has zeros. ``HangEvidence``
adds what absence means, and which members of a line have issued what. Nothing is compared or concluded here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from torchscout.decision.progress import CommGroup, IssuedOp, Process, Progress, RankStatus
from torchscout.mesh import Mesh

__all__ = ["NOTHING", "Bools", "HangEvidence", "Ints", "Members", "Rows", "StatusColumns", "coded"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

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
        order = np.argsort(rows, kind="stable")
        return cls(values[order], np.searchsorted(rows[order], np.arange(count + 1)))

    def __getitem__(self, row: int) -> Ints:
        return self.values[self.starts[row] : self.starts[row + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class StatusColumns:
    """One round: columns by rank, by operation, and by recent operation of a rank."""

    answered: Bools
    running: Bools
    waiting: Ints
    """1 or 0 according to the stack; ``NOTHING`` without a stack."""
    published: Bools
    """Whether the rank has published progress."""
    step: Ints
    operation: Ints
    silent_seconds: npt.NDArray[np.float64]
    device_step: Ints
    """``NOTHING`` if unknown."""
    device_busy: Ints
    """1 or 0; ``NOTHING`` if unknown."""
    captured: Bools
    """Whether CUDA graphs have captured operations of the rank."""
    newest: Ints
    """The last operation; ``NOTHING`` if there is none, or its line is unknown."""
    last_entered: Ints
    """The last operation that the device has reached; ``NOTHING`` if there is none, or it is unknown."""
    last_event: Ints
    """The operation that the rank may be in: on the host the newest one, if nothing was published since; for
    a rank that is gone or stopped, the last one that its device entered."""

    operations: Sequence[IssuedOp]
    """Distinct objects, on known lines; several may be equal."""
    line: Ints
    number: Ints
    place: Ints
    """Equal for operations of the same line and number."""

    recent: Ints
    """Operations of one rank after the other, oldest first."""
    recent_rank: Ints
    """The rank that issued each of ``recent``."""
    entered: Ints
    """For each of ``recent``, the last number on its line that the rank's device has reached; ``NOTHING`` if
    the host itself enters operations, or if unknown."""

    @property
    def on_device(self) -> Bools:
        """Which of ``recent`` a device enters, after the host has issued them."""
        found: Bools = self.entered != NOTHING
        return found

    @property
    def has_entered(self) -> Bools:
        """Which of ``recent`` a device has reached."""
        return self.on_device & (self.number[self.recent] <= self.entered)

    @property
    def has_device(self) -> Bools:
        """Ranks with operations that a device enters."""
        found = np.zeros_like(self.answered)
        found[self.recent_rank[self.on_device]] = True
        return found

    @classmethod
    def of(cls, statuses: Mapping[int, RankStatus], lines: Mapping[str, int], size: int) -> StatusColumns:
        """Build the columns; ``lines`` are the known ones, and ``size`` is greater than any rank."""
        ordered = [statuses[rank] for rank in sorted(statuses)]
        known = [each.progress for each in ordered if each.progress is not None]
        ranks, publishers = _ints(each.rank for each in ordered), _ints(each.rank for each in known)

        def column(ranks: Ints, values: npt.ArrayLike, missing: Any) -> npt.NDArray[Any]:
            filled = np.full(size, missing)
            filled[ranks] = values
            return filled

        operations, line, recent = _distinct(known, lines)
        number = _ints(map(attrgetter("number"), operations))
        recent_rank = np.repeat(publishers, [len(each.recent) for each in known])
        newest = column(recent_rank, recent, NOTHING)  # of several for one rank the last is kept
        at_communication = column(publishers, [each.at_communication for each in known], False)
        recent, recent_rank = recent[recent != NOTHING], recent_rank[recent != NOTHING]
        entered = _entered(known, lines, _pairs(line[recent], recent_rank))
        has_entered = number[recent] <= entered
        last_entered = column(recent_rank[has_entered], recent[has_entered], NOTHING)
        on_host = column(recent_rank, entered == NOTHING, True)  # again the last one
        running = column(ranks, [each.process is Process.RUNNING for each in ordered], False)
        last_event = np.where(at_communication & on_host, newest, np.where(running, NOTHING, last_entered))
        return cls(
            answered=column(ranks, True, False),
            running=running,
            waiting=column(ranks, [_or_nothing(each.waiting) for each in ordered], 0),
            published=column(publishers, True, False),
            step=column(publishers, [each.step for each in known], 0),
            operation=column(publishers, [each.operation for each in known], 0),
            silent_seconds=column(publishers, [each.silent_seconds for each in known], 0.0),
            device_step=column(publishers, [_or_nothing(each.device_step) for each in known], NOTHING),
            device_busy=column(publishers, [_or_nothing(each.device_busy) for each in known], NOTHING),
            captured=column(publishers, [each.captured > 0 for each in known], False),
            newest=newest,
            last_entered=last_entered,
            last_event=last_event,
            operations=operations,
            line=line,
            number=number,
            place=np.unique(_pairs(line, number), return_inverse=True)[1],
            recent=recent,
            recent_rank=recent_rank,
            entered=entered,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The members of one line after the other, and how many operations each has issued there."""

    rank: Ints
    line: Ints
    starts: Ints
    """The start of each line, and the end of the last one."""
    issued: Ints
    """0 for a member that has not answered, or not published."""
    entered: Ints
    """How many of them its device has reached; ``NOTHING`` if unknown, or without a device."""

    @classmethod
    def of(cls, lines: Sequence[CommGroup], statuses: Mapping[int, RankStatus]) -> Members:
        rank = _ints(chain.from_iterable(line.members for line in lines))
        lengths = [len(line.members) for line in lines]
        line = np.repeat(np.arange(len(lines)), lengths)
        codes = {each.key: code for code, each in enumerate(lines)}
        known = [each.progress for each in statuses.values() if each.progress is not None]
        keys = chain.from_iterable(map(attrgetter("issued"), known))
        theirs = _ints(map(codes.get, keys, repeat(NOTHING)))
        whose = np.repeat(_ints(each.rank for each in known), [len(each.issued) for each in known])
        counts = _ints(chain.from_iterable(each.issued.values() for each in known))
        starts, places = np.cumsum([0, *lengths]), _pairs(line, rank)
        issued = _looked_up(places, _pairs(theirs, whose), counts)
        return cls(rank, line, starts, issued, _entered(known, codes, places))

    def of_line(self, line: int) -> slice:
        return slice(self.starts[line], self.starts[line + 1])

    def are(self, lines: Ints, ranks: Ints) -> Bools:
        """Which members are one of ``ranks`` on the corresponding one of ``lines``."""
        return np.isin(_pairs(self.line, self.rank), _pairs(lines, ranks))


def coded(values: Iterable[Hashable]) -> Ints:
    """Map values to small integers, equal for equal values only."""
    listed = list(values)
    codes = {value: code for code, value in enumerate(dict.fromkeys(listed))}
    return _ints(map(codes.__getitem__, listed))


def _distinct(known: Sequence[Progress], lines: Mapping[str, int]) -> tuple[list[IssuedOp], Ints, Ints]:
    """Return distinct recent operations, their lines, and the index of each recent one (or ``NOTHING``)."""
    flat = list(chain.from_iterable(map(attrgetter("recent"), known)))
    _, first, which = np.unique(_ints(map(id, flat)), return_index=True, return_inverse=True)
    objects = list(map(flat.__getitem__, first.tolist()))
    line = _ints(map(lines.get, map(attrgetter("line"), objects), repeat(NOTHING)))
    is_known = line != NOTHING
    index = np.where(is_known, np.cumsum(is_known) - 1, NOTHING)
    return list(compress(objects, is_known.tolist())), line[is_known], index[which]


def _entered(known: Sequence[Progress], lines: Mapping[str, int], places: Ints) -> Ints:
    """Return how far the device is for each pair of line and rank; ``NOTHING`` if unknown."""
    devices = [each for each in known if each.entered]
    keys = chain.from_iterable(map(attrgetter("entered"), devices))
    theirs = _ints(map(lines.get, keys, repeat(NOTHING)))
    whose = np.repeat(_ints(each.rank for each in devices), [len(each.entered) for each in devices])
    counts = _ints(chain.from_iterable(each.entered.values() for each in devices))
    return _looked_up(places, _pairs(theirs, whose), counts - NOTHING) + NOTHING


def _pairs(lines: Ints, others: Ints) -> Ints:
    """Combine a line with a rank or a number on it; neither has more than 32 bits."""
    return (lines << 32) + others


def _looked_up(keys: Ints, known: Ints, values: Ints) -> Ints:
    """Return the value of each key, 0 if unknown."""
    order = np.argsort(known)
    known, values = np.append(known[order], np.iinfo(np.int64).max), np.append(values[order], 0)
    at = np.searchsorted(known, keys)
    return np.where(known[at] == keys, values[at], 0)


def _or_nothing(value: int | None) -> int:
    return NOTHING if value is None else int(value)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


_UNKNOWN = -1
"""The number of operations of a rank that did not answer."""
_EVERYTHING = np.iinfo(np.int64).max

# [Note: Absence]
#
# If a rank does not answer, its machine, its trainer and observer, or only its observer is gone or
# unreachable. If no rank of a known machine answers, the machine is *lost*, and its ranks are as dead as a
# trainer that is known to be gone. A rank that is absent alone is merely *unheard*: it must not be blamed for
# a hang that another rank explains, so it is assumed to have issued everything, and is suspected only if
# nothing else explains a wait.


class HangEvidence:
    """One round: the statuses of the ranks that answered, with the lines and the mesh of the job."""

    def __init__(
        self,
        statuses: Iterable[RankStatus],
        lines: Mapping[str, CommGroup],
        mesh: Mesh,
        *,
        absent: str = "did not answer",
    ) -> None:
        self.absent = absent
        """What sentences say about a rank without a status."""
        self.statuses: dict[int, RankStatus] = {}
        for status in statuses:
            if status.rank in self.statuses:
                raise ValueError(f"rank {status.rank} answered twice in one round")
            self.statuses[status.rank] = status
        self.mesh = mesh
        # A group of one waits for nobody.
        self.lines = {key: line for key, line in lines.items() if len(line.members) > 1}
        self.index = {key: index for index, key in enumerate(self.lines)}
        """Line -> its index in columns."""
        self.members = Members.of(tuple(self.lines.values()), self.statuses)
        highest = max(len(mesh) - 1, *self.statuses, int(self.members.rank.max(initial=0)), 0)
        self.columns = StatusColumns.of(self.statuses, self.index, highest + 1)
        self.lost, self.unheard = self._absent()
        """Ranks of lost machines, and other ranks that did not answer; see [Note: Absence]."""
        halted = np.flatnonzero(self.columns.answered & ~self.columns.running)
        self.dead = self.lost.union(halted.tolist())
        """Ranks that will not issue another operation: gone, stopped, or on a lost machine."""
        self.is_dead: Bools = np.zeros_like(self.columns.answered)
        self.is_dead[list(self.dead)] = True
        self._reached = self._count_reached(halted)
        self.answered: Ints = self._per_line(np.add, self.columns.answered[self.members.rank])
        """How many members of each line answered."""
        issued_by_all = self._per_line(np.minimum, self._reached)
        self.is_open: Bools = self.columns.number > issued_by_all[self.columns.line]
        """Whether each operation misses members."""

    @property
    def in_communication(self) -> Bools:
        """Ranks that may be inside a communication."""
        by_event = (self.columns.waiting == NOTHING) & (self.columns.last_event != NOTHING)
        found: Bools = by_event | (self.columns.waiting == 1)
        return found

    def progress(self, rank: int) -> Progress | None:
        status = self.statuses.get(rank)
        return None if status is None else status.progress

    def recent(self, rank: int) -> tuple[IssuedOp, ...]:
        """The last operations of ``rank`` on known lines, oldest first."""
        progress = self.progress(rank)
        return () if progress is None else tuple(each for each in progress.recent if each.line in self.lines)

    def issued(self, rank: int, line: str) -> int:
        """How many operations ``rank`` has issued on ``line``; -1 if it did not answer."""
        if rank not in self.statuses:
            return _UNKNOWN
        progress = self.progress(rank)
        return 0 if progress is None else progress.issued.get(line, 0)

    def issued_by(self, line: str) -> tuple[Ints, Ints]:
        """The members of ``line``, and how many operations each has issued; -1 if it did not answer."""
        here = self.members.of_line(self.index[line])
        ranks = self.members.rank[here]
        return ranks, np.where(self.columns.answered[ranks], self.members.issued[here], _UNKNOWN)

    def entered(self, rank: int, line: str) -> int | None:
        """How many operations of ``line`` the device of ``rank`` has reached; None if unknown."""
        progress = self.progress(rank)
        return None if progress is None else progress.entered.get(line)

    def reached_by(self, line: str) -> tuple[Ints, Ints]:
        """As ``issued_by``, but how many operations the device has entered where devices enter them."""
        ranks, issued = self.issued_by(line)
        entered = self.members.entered[self.members.of_line(self.index[line])]
        return ranks, np.where(entered == NOTHING, issued, np.minimum(issued, entered))

    def on_device(self, line: str) -> bool:
        """Whether devices enter the operations of ``line``."""
        return bool((self.members.entered[self.members.of_line(self.index[line])] != NOTHING).any())

    def missing(self, operation: int) -> Ints:
        """The members without which an operation cannot finish: not issued, or died after announcing it."""
        here = self.members.of_line(self.columns.line[operation])
        ranks: Ints = self.members.rank[here][self._reached[here] < self.columns.number[operation]]
        return ranks

    def whole_lines(self, inside: Bools) -> Bools:
        """Lines of which all members that answered are ``inside``."""
        outside = self._per_line(np.add, (self.columns.answered & ~inside)[self.members.rank])
        return np.equal(outside, 0)

    def silence(self, ranks: Iterable[int]) -> float:
        """The longest silence among ``ranks``, in seconds."""
        return float(self.columns.silent_seconds[list(ranks)].max(initial=0.0))

    def _absent(self) -> tuple[frozenset[int], frozenset[int]]:
        absent = np.flatnonzero(~self.columns.answered[: len(self.mesh)]).tolist()
        # Hosts matter only if a rank is absent.
        answered = {self.mesh.host_of(rank) for rank in self.statuses if absent} | {None}
        lost = frozenset(rank for rank in absent if self.mesh.host_of(rank) not in answered)
        return lost, frozenset(absent) - lost

    def _count_reached(self, halted: Ints) -> Ints:
        """How many operations of its line each member has entered or, as far as is known, will enter."""
        members, columns = self.members, self.columns
        died_at = columns.last_event[halted]
        halted, died_at = halted[died_at != NOTHING], died_at[died_at != NOTHING]
        reached = members.issued - members.are(columns.line[died_at], halted)
        # A device may not have reached what its host has issued; other members wait for the device.
        reached = np.where(members.entered == NOTHING, reached, np.minimum(reached, members.entered))
        # See [Note: Absence].
        absent = ~columns.answered[members.rank]
        reached[absent] = np.where(self.is_dead[members.rank[absent]], _UNKNOWN, _EVERYTHING)
        return reached

    def _per_line(self, reduce: np.ufunc, values: npt.NDArray[Any]) -> Ints:
        return np.asarray(reduce.reduceat(values, self.members.starts[:-1], dtype=np.int64))
