"""What the ranks reported in one round of the observers, by rank and by line (paper, section 7).

``RankColumns`` has an entry for each rank of the job; a rank that has not answered, or not published, has
zeros. ``HangEvidence`` adds what absence means, and which members of a line have issued what. Nothing is
compared or concluded here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchscout.decision.hang.table import NOTHING, Bools, Ints, RoundTable, ordered, spans, table_of
from torchscout.decision.progress import CommGroup, IssuedOp, Progress, RankStatus
from torchscout.mesh import Mesh

__all__ = ["HangEvidence", "Members", "RankColumns"]


@dataclass(frozen=True, slots=True, eq=False)
class RankColumns:
    """Columns by rank; see ``RoundTable`` for those that it has too."""

    answered: Bools
    running: Bools
    waiting: Ints
    published: Bools
    step: Ints
    operation: Ints
    silent_seconds: npt.NDArray[np.float64]
    device_step: Ints
    device_busy: Ints
    captured: Bools
    has_device: Bools
    """Whether a device enters operations of the rank, after the host has issued them."""
    newest: Ints
    """The last operation; ``NOTHING`` if there is none, or its line is unknown."""
    last_entered: Ints
    """The last operation that the device has reached; ``NOTHING`` if there is none, or it is unknown."""
    last_event: Ints
    """The operation that the rank may be in: on the host the newest one, if nothing was published since; for
    a rank that is gone or stopped, the last one that its device entered."""

    @classmethod
    def of(cls, table: RoundTable, size: int) -> RankColumns:
        """``size`` is greater than any rank."""

        def column(values: npt.ArrayLike, missing: Any, ranks: Ints = table.rank) -> npt.NDArray[Any]:
            filled = np.full(size, missing)
            filled[ranks] = values
            return filled

        last = table.starts[1:] - 1
        shows, is_known = np.diff(table.starts) > 0, table.row_line != NOTHING

        def latest(rows: Ints, operations: Ints) -> Ints:
            """The last of ``operations``, each the last in its row, for each rank; rows of a rank adjoin."""
            firsts = np.flatnonzero(np.diff(table.row_rank[rows], prepend=NOTHING))
            places = (table.order[operations].astype(np.int64) << 32) + np.arange(len(rows))
            which = np.maximum.reduceat(places, firsts) & 0xFFFF_FFFF if len(firsts) else firsts
            found = np.where(is_known[rows[which]], operations[which], NOTHING)
            return column(found, NOTHING, table.row_rank[rows[firsts]])

        newest = latest(rows := np.flatnonzero(shows), last[rows])
        of_known = newest if is_known.all() else latest(rows := np.flatnonzero(shows & is_known), last[rows])
        on_host = np.full(size, True)
        on_host[of_known != NOTHING] = table.entered[table.row_of(of_known[of_known != NOTHING])] == NOTHING
        on_device = np.flatnonzero(shows & is_known & (table.entered != NOTHING))
        reached = _last_reached(table, on_device)
        last_entered = latest(on_device[reached != NOTHING], reached[reached != NOTHING])
        running, at_communication = column(table.running, False), column(table.at_communication, False)
        return cls(
            answered=column(True, False),
            running=running,
            waiting=column(table.waiting, 0),
            published=column(table.published, False),
            step=column(table.step, 0),
            operation=column(table.operation, 0),
            silent_seconds=column(table.silent_seconds, 0.0),
            device_step=column(table.device_step, NOTHING),
            device_busy=column(table.device_busy, NOTHING),
            captured=column(table.captured, False),
            has_device=column(True, False, table.row_rank[on_device]),
            newest=newest,
            last_entered=last_entered,
            last_event=np.where(at_communication & on_host, newest, np.where(running, NOTHING, last_entered)),
        )


def _last_reached(table: RoundTable, rows: Ints) -> Ints:
    """Return the last operation of each row that the device has reached; ``NOTHING`` if none is shown."""
    behind = table.issued[rows] - table.entered[rows]
    first, high = table.starts[rows], table.starts[rows + 1]
    # The operations before ``low`` have been reached; if none is missing in between, no others.
    low = np.maximum(high - np.maximum(behind - table.age[high - 1], 0), first)
    more = np.flatnonzero(low < high)
    none_missing = more[table.age[low[more]] < behind[more]]
    high[none_missing] = low[none_missing]
    while (open_ := np.flatnonzero(low < high)).size:
        middle = (low[open_] + high[open_]) // 2
        has_reached = table.age[middle] >= behind[open_]
        low[open_[has_reached]] = middle[has_reached] + 1
        high[open_[~has_reached]] = middle[~has_reached]
    return np.where(low > first, low - 1, NOTHING)


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
    def of(cls, table: RoundTable) -> Members:
        members = table.lines.members
        line = np.repeat(np.arange(len(table.lines)), members.lengths)
        rows = np.flatnonzero(table.row_line != NOTHING)
        rows = rows[ordered(table.row_line[rows])]  # by line and, because they were by rank, by rank
        keys, wanted = _pairs(table.row_line[rows], table.row_rank[rows]), _pairs(line, members.values)
        if np.array_equal(keys, wanted):  # all members have answered, and are listed in ascending order
            return cls(members.values, line, members.starts, table.issued[rows], table.entered[rows])
        rows, keys = np.append(rows, NOTHING), np.append(keys, np.iinfo(np.int64).max)
        at = np.searchsorted(keys, wanted)
        found = np.where(keys[at] == wanted, rows[at], NOTHING)
        # The last entry stands for a member without a row.
        issued, entered = np.append(table.issued, 0)[found], np.append(table.entered, NOTHING)[found]
        return cls(members.values, line, members.starts, issued, entered)

    def of_line(self, line: int) -> slice:
        return slice(self.starts[line], self.starts[line + 1])

    def are(self, lines: Ints, ranks: Ints) -> Bools:
        """Which members are one of ``ranks`` on the corresponding one of ``lines``."""
        return np.isin(_pairs(self.line, self.rank), _pairs(lines, ranks))


def _pairs(lines: Ints, others: Ints) -> Ints:
    """Combine a line with a rank or a number on it; neither has more than 32 bits."""
    return (lines << 32) + others


_UNKNOWN = -1
"""The number of operations of a rank that did not answer."""
_EVERYTHING = np.iinfo(np.int64).max

# [Note: Absence]
#
# If a rank does not answer, its machine, its trainer and observer, or only its observer is gone or
# unreachable. If no rank of a known machine answers, the machine is *lost*, and its ranks are as dead as a
# trainer that is known to be gone. A rank that is absent alone is merely *unheard*: it must not be blamed for
# a hang that another rank explains, so it is assumed to have issued everything. If nothing else explains a
# wait, either the rank is the cause, or its report was lost and an operation has stalled that it has entered.
# Both look the same to all other ranks, so the group is reported, with the rank that is absent, and nobody is
# named.


class HangEvidence:
    """One round: what the ranks that answered reported, with the mesh of the job."""

    def __init__(self, table: RoundTable, mesh: Mesh, *, absent: str = "did not answer") -> None:
        self.absent = absent
        """What sentences say about a rank without a status."""
        self.table, self.statuses, self.lines, self.mesh = table, table.statuses, table.lines, mesh
        self.members = Members.of(table)
        highest = max(len(mesh) - 1, table.rank.max(initial=0), self.members.rank.max(initial=0))
        self.columns = RankColumns.of(table, int(highest) + 1)
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
        self._reached_by_all = np.append(self._per_line(np.minimum, self._reached), _EVERYTHING)
        """By line; the last entry stands for a line that is not known."""
        open_rows = np.flatnonzero(table.issued > self._reached_by_all[table.row_line])
        operations, rows = table.expanded(open_rows)
        is_open = table.numbers(operations, rows) > self._reached_by_all[table.row_line[rows]]
        self.open, self.open_row = operations[is_open], rows[is_open]
        """The operations that miss members, and their rows."""

    @classmethod
    def of(
        cls,
        statuses: Iterable[RankStatus],
        lines: Mapping[str, CommGroup],
        mesh: Mesh,
        *,
        absent: str = "did not answer",
    ) -> HangEvidence:
        by_rank: dict[int, RankStatus] = {}
        for status in statuses:
            if status.rank in by_rank:
                raise ValueError(f"rank {status.rank} answered twice in one round")
            by_rank[status.rank] = status
        return cls(table_of(by_rank, lines), mesh, absent=absent)

    def are_open(self, operations: Ints) -> Bools:
        """Whether each operation misses members."""
        rows = self.table.row_of(operations)
        found: Bools = self.table.numbers(operations, rows) > self._reached_by_all[self.table.row_line[rows]]
        return found

    def line_of(self, operations: Ints) -> Ints:
        return self.table.row_line[self.table.row_of(operations)]

    def places(self, operations: Ints) -> Ints:
        """Return small integers, equal for operations of the same line and number only."""
        rows = self.table.row_of(operations)
        pairs = _pairs(self.table.row_line[rows], self.table.numbers(operations, rows))
        return np.unique(pairs, return_inverse=True)[1]

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
        here = self.members.of_line(self.lines.index(line))
        ranks = self.members.rank[here]
        return ranks, np.where(self.columns.answered[ranks], self.members.issued[here], _UNKNOWN)

    def entered(self, rank: int, line: str) -> int | None:
        """How many operations of ``line`` the device of ``rank`` has reached; None if unknown."""
        progress = self.progress(rank)
        return None if progress is None else progress.entered.get(line)

    def reached_by(self, line: str) -> tuple[Ints, Ints]:
        """As ``issued_by``, but how many operations the device has entered where devices enter them."""
        ranks, issued = self.issued_by(line)
        entered = self.members.entered[self.members.of_line(self.lines.index(line))]
        return ranks, np.where(entered == NOTHING, issued, np.minimum(issued, entered))

    def on_device(self, line: str) -> bool:
        """Whether devices enter the operations of ``line``."""
        return bool((self.members.entered[self.members.of_line(self.lines.index(line))] != NOTHING).any())

    def missing(self, lines: Ints, numbers: Ints, by_dead: Bools) -> tuple[Ints, Ints]:
        """Return the members without which operations cannot finish, and the operation of each.

        They have not issued it, or died after announcing it. For an operation in which dead ranks wait,
        ``by_dead``, only ranks that have died before them count: see ``wait_graph``, [Note: Deaths].
        """
        members = self.members
        slots, which = spans(members.starts[lines], np.diff(members.starts)[lines])
        ranks = members.rank[slots]
        issued = np.where(self.columns.answered[ranks], members.issued[slots], _UNKNOWN)
        reached = np.where(by_dead[which], issued, self._reached[slots])
        is_missing = (reached < numbers[which]) & (self.is_dead[ranks] | ~by_dead[which])
        return ranks[is_missing], which[is_missing]

    def whole_lines(self, inside: Bools) -> Bools:
        """Lines of which all members that answered are ``inside``."""
        outside = self._per_line(np.add, (self.columns.answered & ~inside)[self.members.rank])
        return np.equal(outside, 0)

    def silence(self, ranks: Iterable[int]) -> float:
        """The longest silence among ``ranks``, in seconds."""
        return float(self.columns.silent_seconds[list(ranks)].max(initial=0.0))

    def _absent(self) -> tuple[frozenset[int], frozenset[int]]:
        answered, mesh = self.columns.answered, self.mesh
        absent = np.flatnonzero(~answered[: len(mesh)]).tolist()
        hosts = [each for each in mesh.hosts_of(absent) if not answered[list(mesh.ranks_on(each))].any()]
        lost = frozenset(rank for host in hosts for rank in mesh.ranks_on(host))
        return lost, frozenset(absent) - lost

    def _count_reached(self, halted: Ints) -> Ints:
        """How many operations of its line each member has entered or, as far as is known, will enter."""
        members, columns = self.members, self.columns
        died_at = columns.last_event[halted]
        halted, died_at = halted[died_at != NOTHING], died_at[died_at != NOTHING]
        reached = members.issued - members.are(self.line_of(died_at), halted)
        # A device may not have reached what its host has issued; other members wait for the device.
        reached = np.where(members.entered == NOTHING, reached, np.minimum(reached, members.entered))
        # See [Note: Absence].
        absent = ~columns.answered[members.rank]
        reached[absent] = np.where(self.is_dead[members.rank[absent]], _UNKNOWN, _EVERYTHING)
        return reached

    def _per_line(self, reduce: np.ufunc, values: npt.NDArray[Any]) -> Ints:
        return np.asarray(reduce.reduceat(values, self.members.starts[:-1], dtype=np.int64))
