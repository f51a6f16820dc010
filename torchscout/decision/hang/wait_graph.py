"""Which rank waits for which, and which ranks the whole job waits for (paper, section 7).

A rank waits in an operation, and an operation waits for the members that have not entered it. Operations
are nodes of the graph, so that a line costs as many edges as it has members, however many of them wait.
These edges are causal: they name a rank in a group of any size, without a vote.

If all members have entered an operation and it does not return, it has *stalled* in the runtime or the
transport. No rank is behind there, so the stall is attributed to the process group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchscout.decision.hang.evidence import NOTHING, Bools, HangEvidence, Ints, Rows
from torchscout.decision.progress import IssuedOp

__all__ = ["Operation", "Stalled", "WaitGraph", "stalled_operations", "stalled_together"]

# [Note: Stalled]
#
# A rank whose stack is in a wait, and whose operations all members have entered, is in a stalled operation.
# Without a stack, or if another posted operation misses members, only the other members show it: all that
# answered are at the same operation. If some of them went on, the operation is over, and the rank works or
# waits elsewhere. Where devices enter operations, devices are compared: all of them reached that operation
# last, and all have work left.


@dataclass(slots=True)
class Stalled:
    """Ranks that wait for an operation rather than for a rank."""

    lines: dict[str, IssuedOp]
    """Line -> the stalled operation."""
    ranks: Bools

    def add(self, other: Stalled) -> None:
        self.lines |= other.lines
        self.ranks = self.ranks | other.ranks


def stalled_operations(evidence: HangEvidence, blocked: Bools) -> Stalled:
    """See [Note: Stalled]; ``blocked`` ranks are known to wait for another rank."""
    columns = evidence.columns
    found = _at_same_operation(evidence)
    # A host that waits for its device does not wait in a communication itself.
    alone = (
        (columns.waiting == 1) & ~blocked & ~found.ranks & (columns.newest != NOTHING) & ~columns.has_device
    )
    inside = found.ranks | alone
    shown = alone[columns.recent_rank]
    operations, ranks = columns.recent[shown], columns.recent_rank[shown]
    # Of all posted operations prefer one whose members are all inside to the last one.
    in_whole = evidence.whole_lines(inside)[columns.line[operations]]
    chosen = columns.newest.copy()
    chosen[ranks[in_whole]] = operations[in_whole]  # of several for one rank the last one is kept
    found.add(Stalled(_by_line(evidence, chosen[alone]), inside))
    return found


def stalled_together(evidence: HangEvidence, ranks: Sequence[int]) -> Stalled:
    """Those of ``ranks`` without a stack that make up whole lines; none of ``ranks`` waits for another."""
    columns = evidence.columns
    unsure = np.zeros_like(columns.running)
    unsure[ranks] = True
    unsure &= columns.running & (columns.waiting == NOTHING) & ~columns.has_device
    theirs = unsure[columns.recent_rank] & evidence.whole_lines(unsure)[columns.line[columns.recent]]
    together = np.zeros_like(unsure)
    together[columns.recent_rank[theirs]] = True
    return Stalled(_by_line(evidence, columns.recent[theirs]), together)


def _at_same_operation(evidence: HangEvidence) -> Stalled:
    columns = evidence.columns
    on_device = columns.running & (columns.device_busy == 1) & ~columns.captured
    last = np.where(on_device, columns.last_entered, columns.last_event)
    ranks = np.flatnonzero((evidence.in_communication | on_device) & (last != NOTHING))
    operations = last[ranks]
    _, first, member_of, sizes = np.unique(
        columns.place[operations], return_index=True, return_inverse=True, return_counts=True
    )
    shown = operations[first]
    complete = (sizes == evidence.answered[columns.line[shown]]) & ~evidence.is_open[shown]
    inside = np.zeros_like(columns.running)
    inside[ranks[complete[member_of]]] = True
    return Stalled(_by_line(evidence, shown[complete]), inside)


def _by_line(evidence: HangEvidence, operations: Ints) -> dict[str, IssuedOp]:
    """The last of ``operations`` on each line."""
    last = np.full(len(evidence.lines), NOTHING)
    last[evidence.columns.line[operations]] = operations
    shown = (evidence.columns.operations[operation] for operation in last[last != NOTHING].tolist())
    return {each.line: each for each in shown}


# [Note: Waiting]
#
# A rank is *blocked* if its stack is in a wait or, without a stack, if the last thing it announced is an
# operation that misses members. A stack in a wait does not show which of the posted operations it waits for,
# so every one that misses members becomes an edge.
#
# A rank that only posted operations and went on is not blocked. If a stack shows it working, it has no edges.
# Without a stack it may wait or work: it keeps edges to what it has posted, but no wait begins with them, and
# a cycle through it is not a deadlock, because all other ranks of the cycle wait. An example is a stage that
# posts a receive early and then sleeps.
#
# Where a device enters the operations (NCCL), the host issues them and runs ahead until it blocks in a call
# that no stack explains. There the progress of the device decides, whatever the host is doing: a rank waits
# in every operation that its device has entered and that misses members, and an operation misses every
# member whose device has not entered it.
#
# [Note: Deaths]
#
# A rank that is gone or stopped is the source of every wait for it, unless it died waiting for a rank that
# had died before: a lost connection ends one trainer after the other. Waiting for a living rank is no excuse.


class Operation(NamedTuple):
    """An operation that ranks wait in."""

    line: str
    number: int
    by_dead: bool
    """The waiting ranks are dead, so that only ranks which died before them count as missing."""


_Node = int
"""A rank or, if negative, ``~place`` of an operation in the list of operations that ranks wait in."""


class WaitGraph:
    """The waits of one round."""

    def __init__(self, evidence: HangEvidence) -> None:
        self._evidence = evidence
        ranks, operations, is_certain = _waits(evidence)
        self._operations: list[Operation] = []
        self._issued: list[IssuedOp] = []
        self._targets: list[list[int]] = []
        places = self._add(operations, ~evidence.columns.running[ranks])
        misses = np.array([bool(targets) for targets in self._targets], dtype=bool)[places]
        ranks, places = ranks[misses], places[misses]
        self._waits = Rows.grouped(ranks, places, len(evidence.columns.running))
        self._waiting = Rows.grouped(places, ranks, len(self._operations))
        self.blocked: Bools = (np.diff(self._waits.starts) > 0) & is_certain
        """Ranks that certainly wait for another rank."""
        self.stalled = stalled_operations(evidence, self.blocked)
        """Ranks that wait for no other rank, and whose operation does not return."""
        self._missed: dict[int, list[int]] = defaultdict(list)
        for place, targets in enumerate(self._targets):
            for rank in targets:
                self._missed[rank].append(place)
        self._reached: set[_Node] = set()
        self._least: dict[int, tuple[int, int]] = {}
        self.sources: list[int] = []
        """Ranks that others wait for and that wait for nobody, ascending."""
        self.cycles: list[tuple[int, ...]] = []
        """Ranks that wait for each other and for nobody else."""
        self._find_roots()

    def missing(self, rank: int) -> list[IssuedOp]:
        """Return the operations in which other ranks wait for ``rank``, one for each line.

        The first is the one in which the ranks with the least progress wait, which ``rank`` should have
        entered next.
        """
        places = [place for place in self._missed.get(rank, ()) if ~place in self._reached]
        lines: dict[str, IssuedOp] = {}
        for place in sorted(places, key=self._least_progress):
            lines.setdefault(self._operations[place].line, self._issued[place])
        return list(lines.values())

    def _least_progress(self, place: int) -> tuple[tuple[int, int], Operation]:
        if place not in self._least:
            columns, ranks = self._evidence.columns, self._waiting[place]
            steps = columns.step[ranks]
            operations = columns.operation[ranks[steps == steps.min()]]
            self._least[place] = int(steps.min()), int(operations.min())
        return self._least[place], self._operations[place]

    def inside(self, cycle: Sequence[int]) -> dict[int, IssuedOp]:
        """Return the operation in which each rank of a cycle waits for another rank of it."""
        ranks = set(cycle)
        return {
            rank: next(
                self._issued[place]
                for place in self._waits[rank].tolist()
                if not ranks.isdisjoint(self._targets[place])
            )
            for rank in cycle
        }

    def waiters(self, ranks: Iterable[int]) -> set[int]:
        """Return the other ranks that wait for one of ``ranks``, directly or indirectly."""
        named = list(ranks)
        waiting = np.zeros_like(self.blocked)
        reached, frontier, followed = set(named), list(named), set[int]()
        while frontier:
            for place in self._missed.get(frontier.pop(), ()):
                if place not in followed:
                    followed.add(place)
                    waiting[self._waiting[place]] = True
                    # No operation misses most of them, so that the search ends there.
                    new = self._missed.keys() & set(self._waiting[place].tolist()) - reached
                    reached |= new
                    frontier += new
        waiting[named] = False
        return set(np.flatnonzero(waiting & self.blocked).tolist())

    def _add(self, operations: Ints, by_dead: Bools) -> Ints:
        """Return the place of each operation; dead and living ranks wait in separate ones."""
        columns = self._evidence.columns
        _, first, places = np.unique(
            2 * columns.place[operations] + by_dead, return_index=True, return_inverse=True
        )
        for operation, dead in zip(operations[first].tolist(), by_dead[first].tolist(), strict=True):
            issued = columns.operations[operation]
            self._operations.append(Operation(issued.line, issued.number, dead))
            self._issued.append(issued)
            self._targets.append(self._missed_by(operation, by_dead=dead))
        return places

    def _missed_by(self, operation: int, *, by_dead: bool) -> list[int]:
        evidence, issued = self._evidence, self._evidence.columns.operations[operation]
        missing = evidence.missing(operation)
        if by_dead:  # See [Note: Deaths].
            ranks, counts = evidence.issued_by(issued.line)
            missing = ranks[evidence.is_dead[ranks] & (counts < issued.number)]
        found: list[int] = missing.tolist()
        return found

    def _after(self, node: _Node) -> list[_Node]:
        return self._targets[~node] if node < 0 else (~self._waits[node]).tolist()

    def _find_roots(self) -> None:
        """Find the strongly connected components that no edge leaves."""
        # Start at operations: most waiting ranks are no root, because no rank waits for them.
        waited_in = self._waits.values[np.repeat(self.blocked, np.diff(self._waits.starts))]
        for component in _components((~np.unique(waited_in)).tolist(), self._after):
            inside = set(component)
            self._reached |= inside
            if any(after not in inside for node in component for after in self._after(node)):
                continue
            ranks = sorted(node for node in component if node >= 0)
            free = [rank for rank in ranks if not self.blocked[rank]]
            self.sources += free
            if not free and not self.stalled.ranks[ranks].any():
                self.cycles.append(tuple(ranks))
        # Sources without a stack that make up a whole line, all equally far, may be in a stalled operation.
        self.stalled.add(stalled_together(self._evidence, self.sources))
        self.sources = sorted(rank for rank in self.sources if not self.stalled.ranks[rank])
        self.cycles.sort()


def _waits(evidence: HangEvidence) -> tuple[Ints, Ints, Bools]:
    """Return ranks and the operations they wait in, and which ranks certainly wait. See [Note: Waiting]."""
    columns, last = evidence.columns, evidence.columns.last_event
    has_last = last != NOTHING
    dead = columns.answered & ~columns.running & has_last
    at_last = columns.running & (columns.waiting == NOTHING) & has_last
    at_last[at_last] = evidence.is_open[last[at_last]]
    in_last = np.flatnonzero(dead | at_last)
    by_host = (columns.running & (columns.waiting != 0) & ~at_last)[columns.recent_rank] & ~columns.on_device
    by_device = columns.running[columns.recent_rank] & columns.has_entered
    by_device &= evidence.is_open[columns.recent]
    ranks = np.concatenate([in_last, columns.recent_rank[by_host | by_device]])
    operations = np.concatenate([last[in_last], columns.recent[by_host | by_device]])
    ranks, operations = ranks[evidence.is_open[operations]], operations[evidence.is_open[operations]]
    order = np.argsort(ranks, kind="stable")
    is_certain = dead | at_last | (columns.waiting == 1)
    is_certain[columns.recent_rank[by_device]] = True
    return ranks[order], operations[order], is_certain


def _components(starts: Iterable[_Node], after: Callable[[_Node], Iterable[_Node]]) -> Iterator[list[_Node]]:
    """Yield the strongly connected components reachable from ``starts`` (Tarjan, without recursion)."""
    index: dict[_Node, int] = {}
    lowest: dict[_Node, int] = {}
    stack: list[_Node] = []
    stacked: set[_Node] = set()
    path: list[tuple[_Node, Iterator[_Node]]] = []

    def enter(node: _Node) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        stacked.add(node)
        path.append((node, iter(after(node))))

    for start in starts:
        if start not in index:
            enter(start)
        while path:
            node, rest = path[-1]
            for child in rest:
                if child not in index:
                    enter(child)
                    break
                if child in stacked:
                    lowest[node] = min(lowest[node], index[child])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
                if lowest[node] == index[node]:
                    yield _unwind(stack, stacked, node)


def _unwind(stack: list[_Node], stacked: set[_Node], last: _Node) -> list[_Node]:
    component: list[_Node] = []
    while not component or component[-1] != last:
        component.append(stack.pop())
        stacked.remove(component[-1])
    return component
