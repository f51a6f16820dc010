"""Who answered a round of the observers, and what the members of each line have issued (paper, section 7).

One round of standings, reduced for the questions that ``protocol`` and ``wait_graph`` ask. Facts
only: it compares nothing and blames nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from torchscout.decision.columns import NOTHING, Bools, Ints, Members, Standings
from torchscout.decision.progress import Issued, Line, Progress, Standing
from torchscout.mesh import Mesh

__all__ = ["RollCall"]

_UNKNOWN = -1
"""What a rank has issued that did not answer."""
_EVERYTHING = np.iinfo(np.int64).max

# [Note: Absence]
#
# That a rank does not answer means that its machine, its trainer and observer, or only its observer
# is gone or out of reach. When nobody of a known machine answers, the machine is *lost*, and its ranks
# are as dead as a trainer known to be gone. A rank that is absent alone is merely *unheard*: a lost
# datagram must not be blamed for a hang that somebody else explains, so the unheard are taken to have
# issued everything, and come under suspicion only where a wait is otherwise without a reason.


class RollCall:
    """One round: the standings of the ranks that answered, over the lines and the mesh of the job."""

    def __init__(
        self,
        standings: Iterable[Standing],
        lines: Mapping[str, Line],
        mesh: Mesh,
        *,
        absent: str = "did not answer",
    ) -> None:
        self.absent = absent
        """What is said of a rank without a standing."""
        self.standings: dict[int, Standing] = {}
        for standing in standings:
            if standing.rank in self.standings:
                raise ValueError(f"rank {standing.rank} answered twice in one round")
            self.standings[standing.rank] = standing
        self.mesh = mesh
        # A group of one waits for nobody.
        self.lines = {key: line for key, line in lines.items() if len(line.members) > 1}
        self.index = {key: index for index, key in enumerate(self.lines)}
        """Of each line, in columns."""
        self.members = Members.of(tuple(self.lines.values()), self.standings)
        highest = max(len(mesh) - 1, *self.standings, int(self.members.rank.max(initial=0)), 0)
        self.columns = Standings.of(self.standings, self.index, highest + 1)
        self.lost, self.unheard = self._absent()
        """Ranks of the machines of which nobody answered, and others that did not; see [Note: Absence]."""
        halted = np.flatnonzero(self.columns.answered & ~self.columns.running)
        self.dead = self.lost.union(halted.tolist())
        """Ranks that will not issue anything more: gone, stopped, or of a lost machine."""
        self.is_dead: Bools = np.zeros_like(self.columns.answered)
        self.is_dead[list(self.dead)] = True
        self._reached = self._count_reached(halted)
        self.answered: Ints = self._per_line(np.add, self.columns.answered[self.members.rank])
        """Of each line, how many members answered."""
        issued_by_all = self._per_line(np.minimum, self._reached)
        self.is_open: Bools = self.columns.number > issued_by_all[self.columns.line]
        """Of each operation, whether it misses members."""

    @property
    def in_communication(self) -> Bools:
        """Who, for all that is known, may be inside a communication."""
        by_event = (self.columns.waiting == NOTHING) & (self.columns.last_event != NOTHING)
        found: Bools = by_event | (self.columns.waiting == 1)
        return found

    def progress(self, rank: int) -> Progress | None:
        standing = self.standings.get(rank)
        return None if standing is None else standing.progress

    def recent(self, rank: int) -> tuple[Issued, ...]:
        """The last operations of ``rank`` on lines that are known, oldest first."""
        progress = self.progress(rank)
        return () if progress is None else tuple(each for each in progress.recent if each.line in self.lines)

    def issued(self, rank: int, line: str) -> int:
        """How many operations ``rank`` has issued on ``line``; -1 where it did not answer."""
        if rank not in self.standings:
            return _UNKNOWN
        progress = self.progress(rank)
        return 0 if progress is None else progress.issued.get(line, 0)

    def issued_by(self, line: str) -> tuple[Ints, Ints]:
        """The members of ``line``, and how many operations each has issued; -1 where it did not answer."""
        here = self.members.of_line(self.index[line])
        ranks = self.members.rank[here]
        return ranks, np.where(self.columns.answered[ranks], self.members.issued[here], _UNKNOWN)

    def entered(self, rank: int, line: str) -> int | None:
        """How many operations of ``line`` the device of ``rank`` has come to; None where that is not
        known."""
        progress = self.progress(rank)
        return None if progress is None else progress.entered.get(line)

    def reached_by(self, line: str) -> tuple[Ints, Ints]:
        """As ``issued_by``, but where a device enters the operations of a line, how many it has entered."""
        ranks, issued = self.issued_by(line)
        entered = self.members.entered[self.members.of_line(self.index[line])]
        return ranks, np.where(entered == NOTHING, issued, np.minimum(issued, entered))

    def on_device(self, line: str) -> bool:
        """Whether devices enter the operations of ``line``."""
        return bool((self.members.entered[self.members.of_line(self.index[line])] != NOTHING).any())

    def missing(self, operation: int) -> Ints:
        """The members without whom an operation does not finish: who has not issued it, or announced it
        and died at that."""
        here = self.members.of_line(self.columns.line[operation])
        ranks: Ints = self.members.rank[here][self._reached[here] < self.columns.number[operation]]
        return ranks

    def whole_lines(self, inside: Bools) -> Bools:
        """Lines of which everybody who answered is ``inside``."""
        outside = self._per_line(np.add, (self.columns.answered & ~inside)[self.members.rank])
        return np.equal(outside, 0)

    def silence(self, ranks: Iterable[int]) -> float:
        """The longest silence among ``ranks``, in seconds."""
        return float(self.columns.silent_seconds[list(ranks)].max(initial=0.0))

    def _absent(self) -> tuple[frozenset[int], frozenset[int]]:
        absent = np.flatnonzero(~self.columns.answered[: len(self.mesh)]).tolist()
        # While nobody is absent, nobody's machine matters.
        heard = {self.mesh.host_of(rank) for rank in self.standings if absent} | {None}
        lost = frozenset(rank for rank in absent if self.mesh.host_of(rank) not in heard)
        return lost, frozenset(absent) - lost

    def _count_reached(self, halted: Ints) -> Ints:
        """How many operations of its line each member will have joined, as far as can be told."""
        members, columns = self.members, self.columns
        died_at = columns.last_event[halted]
        halted, died_at = halted[died_at != NOTHING], died_at[died_at != NOTHING]
        reached = members.issued - members.are(columns.line[died_at], halted)
        # What a host has issued its device may not have come to yet; the others wait for the device.
        reached = np.where(members.entered == NOTHING, reached, np.minimum(reached, members.entered))
        # See [Note: Absence]: the unheard are taken to have issued everything.
        absent = ~columns.answered[members.rank]
        reached[absent] = np.where(self.is_dead[members.rank[absent]], _UNKNOWN, _EVERYTHING)
        return reached

    def _per_line(self, reduce: np.ufunc, values: npt.NDArray[Any]) -> Ints:
        return np.asarray(reduce.reduceat(values, self.members.starts[:-1], dtype=np.int64))
