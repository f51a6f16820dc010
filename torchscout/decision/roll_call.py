"""Who answered a round of the observers, and what the members of each line have issued (paper, section 7).

One round of standings, reduced for the questions that ``protocol`` and ``wait_graph`` ask. Facts
only: it compares nothing and blames nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchscout.decision.progress import Issued, Line, Process, Progress, Standing
from torchscout.mesh import Mesh

__all__ = ["RollCall"]

_UNKNOWN = -1
"""What a rank has issued that did not answer."""

# [Note: Absence]
#
# That a rank does not answer means that its machine, its trainer and observer, or only its observer
# is gone or out of reach. When nobody of a known machine answers, the machine is *lost*, and its ranks
# are as dead as a trainer known to be gone. A rank that is absent alone is merely *unheard*: a lost
# datagram must not be blamed for a hang that somebody else explains, so the unheard are taken to have
# issued everything, and come under suspicion only where a wait is otherwise without a reason.


class RollCall:
    """One round: the standings of the ranks that answered, over the lines and the mesh of the job."""

    def __init__(self, standings: Iterable[Standing], lines: Mapping[str, Line], mesh: Mesh) -> None:
        self.standings: dict[int, Standing] = {}
        for standing in standings:
            if standing.rank in self.standings:
                raise ValueError(f"rank {standing.rank} answered twice in one round")
            self.standings[standing.rank] = standing
        self.mesh = mesh
        # A group of one waits for nobody.
        self.lines = {key: line for key, line in lines.items() if len(line.members) > 1}
        heard = {mesh.host_of(rank) for rank in self.standings} | {None}
        absent = [rank for rank in range(len(mesh)) if rank not in self.standings]
        self.lost = frozenset(rank for rank in absent if mesh.host_of(rank) not in heard)
        """Ranks of the machines of which nobody answered; see [Note: Absence]."""
        self.unheard = frozenset(absent) - self.lost
        halted = (rank for rank, each in self.standings.items() if each.process is not Process.RUNNING)
        self.dead = self.lost.union(halted)
        """Ranks that will not issue anything more: gone, stopped, or of a lost machine."""
        self._answered: dict[str, tuple[int, ...]] = {}
        self._slowest: dict[str, float] = {}
        self._missing: dict[tuple[str, int], tuple[int, ...]] = {}

    def progress(self, rank: int) -> Progress | None:
        standing = self.standings.get(rank)
        return None if standing is None else standing.progress

    def recent(self, rank: int) -> tuple[Issued, ...]:
        """The last operations of ``rank`` on lines that are known, oldest first."""
        progress = self.progress(rank)
        return () if progress is None else tuple(each for each in progress.recent if each.line in self.lines)

    def newest(self, rank: int) -> Issued | None:
        """The last operation of ``rank``; None where there is none, or its line is not known."""
        progress = self.progress(rank)
        if progress is None or not progress.recent or progress.recent[-1].line not in self.lines:
            return None
        return progress.recent[-1]

    def last_event(self, rank: int) -> Issued | None:
        """The operation after whose announcement nothing was seen of ``rank``."""
        progress = self.progress(rank)
        return self.newest(rank) if progress is not None and progress.at_communication else None

    def in_communication(self, rank: int) -> bool:
        """Whether, for all that is known, ``rank`` may be inside a communication."""
        standing = self.standings[rank]
        if standing.waiting is None:
            return self.last_event(rank) is not None
        return standing.waiting

    def issued(self, rank: int, line: str) -> int:
        """How many operations ``rank`` has issued on ``line``; -1 where it did not answer."""
        if rank not in self.standings:
            return _UNKNOWN
        progress = self.progress(rank)
        return 0 if progress is None else progress.issued.get(line, 0)

    def missing(self, line: str, number: int) -> tuple[int, ...]:
        """The members without whom number ``number`` of ``line`` does not finish: who has not issued it,
        or announced it and died at that."""
        if number <= self._issued_by_all(line):
            return ()
        key = line, number
        if key not in self._missing:
            members = self.lines[line].members
            self._missing[key] = tuple(rank for rank in members if self._reached(rank, line) < number)
        return self._missing[key]

    def answered(self, line: str) -> tuple[int, ...]:
        """The members of ``line`` that answered."""
        if line not in self._answered:
            members = self.lines[line].members
            self._answered[line] = tuple(rank for rank in members if rank in self.standings)
        return self._answered[line]

    def silence(self, ranks: Iterable[int]) -> float:
        """The longest silence among ``ranks``, in seconds."""
        known = (each for rank in ranks if (each := self.progress(rank)) is not None)
        return max((progress.silent_seconds for progress in known), default=0.0)

    def _issued_by_all(self, line: str) -> float:
        if line not in self._slowest:
            reached = (self._reached(rank, line) for rank in self.lines[line].members)
            self._slowest[line] = min(reached)
        return self._slowest[line]

    def _reached(self, rank: int, line: str) -> float:
        if rank not in self.standings:
            # See [Note: Absence]: the unheard are taken to have issued everything.
            return _UNKNOWN if rank in self.lost else float("inf")
        last = self.last_event(rank) if rank in self.dead else None
        died_in_it = last is not None and last.line == line
        return self.issued(rank, line) - died_in_it
