"""Which rank waits for which, and which ranks the whole job waits for (paper, section 7).

A rank waits in an operation, and an operation waits for the members that have not entered it. Operations
are nodes of the graph, so that a line costs as many edges as it has members, however many of them wait.
These edges are causal: they name a rank in a group of any size, without a vote.

If all members have entered an operation and it does not return, it has *stalled* in the runtime or the
transport. No rank is behind there, so the stall is attributed to the process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchscout.decision.hang.evidence import HangEvidence
from torchscout.decision.hang.table import NOTHING, Bools, Ints, Rows
from torchscout.decision.progress import IssuedOp

__all__ = ["Stalled", "WaitGraph", "stalled_operations", "stalled_together"]

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

    lines: dict[int, int]
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
    # Of all posted operations prefer one whose members are all inside to the last one.
    table, in_whole = evidence.table, evidence.whole_lines(inside)
    rows = _rows_shown(evidence, alone)
    rows = rows[in_whole[table.row_line[rows]]]
    last = table.starts[rows + 1] - 1
    order = np.argsort(table.order[last], kind="stable")
    chosen = columns.newest.copy()
    chosen[table.row_rank[rows[order]]] = last[order]  # of several for one rank the last one is kept
    found.add(Stalled(_by_line(evidence, chosen[alone]), inside))
    return found


def _rows_shown(evidence: HangEvidence, ranks: Bools) -> Ints:
    """The rows of these ranks, on known lines, that show operations."""
    table = evidence.table
    shows = (table.row_line != NOTHING) & (table.starts[1:] > table.starts[:-1])
    return np.flatnonzero(shows & ranks[table.row_rank])


def stalled_together(evidence: HangEvidence, ranks: Sequence[int]) -> Stalled:
    """Those of ``ranks`` without a stack that make up whole lines; none of ``ranks`` waits for another."""
    columns = evidence.columns
    unsure = np.zeros_like(columns.running)
    unsure[ranks] = True
    unsure &= columns.running & (columns.waiting == NOTHING) & ~columns.has_device
    table, rows = evidence.table, _rows_shown(evidence, unsure)
    rows = rows[evidence.whole_lines(unsure)[table.row_line[rows]]]
    together = np.zeros_like(unsure)
    together[table.row_rank[rows]] = True
    return Stalled(_by_line(evidence, table.starts[rows + 1] - 1), together)


def _at_same_operation(evidence: HangEvidence) -> Stalled:
    columns = evidence.columns
    on_device = columns.running & (columns.device_busy == 1) & ~columns.captured
    last = np.where(on_device, columns.last_entered, columns.last_event)
    ranks = np.flatnonzero((evidence.in_communication | on_device) & (last != NOTHING))
    operations = last[ranks]
    _, first, member_of, sizes = np.unique(
        evidence.places(operations), return_index=True, return_inverse=True, return_counts=True
    )
    shown = operations[first]
    complete = (sizes == evidence.answered[evidence.line_of(shown)]) & ~evidence.are_open(shown)
    inside = np.zeros_like(columns.running)
    inside[ranks[complete[member_of]]] = True
    return Stalled(_by_line(evidence, shown[complete]), inside)


def _by_line(evidence: HangEvidence, operations: Ints) -> dict[int, int]:
    """The last of ``operations`` on each line."""
    return dict(zip(evidence.line_of(operations).tolist(), operations.tolist(), strict=True))


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


_Node = int
"""A rank or, if negative, ``~place`` of an operation in the list of operations that ranks wait in."""


class WaitGraph:
    """The waits of one round."""

    def __init__(self, evidence: HangEvidence) -> None:
        self._evidence = evidence
        size = len(evidence.columns.running)
        ranks, operations, is_certain = _waits(evidence)
        # Dead and living ranks wait in separate operations.
        by_dead = ~evidence.columns.running[ranks]
        _, first, places = np.unique(
            2 * evidence.places(operations) + by_dead, return_index=True, return_inverse=True
        )
        self._operations: Ints = operations[first]
        """One of the equal operations of several ranks."""
        rows = evidence.table.row_of(self._operations)
        lines, numbers = evidence.table.row_line[rows], evidence.table.numbers(self._operations, rows)
        missing, of_place = evidence.missing(lines, numbers, by_dead[first])
        self._targets = Rows.grouped(of_place, missing, len(first))
        self._missed = Rows.grouped(missing, of_place, size)
        """Rank -> the operations that do not finish without it."""
        misses = self._targets.lengths[places] > 0
        ranks, places = ranks[misses], places[misses]
        self._waits = Rows.grouped(ranks, places, size)
        self._waiting = Rows.grouped(places, ranks, len(first))
        self.blocked: Bools = (self._waits.lengths > 0) & is_certain
        """Ranks that certainly wait for another rank."""
        self.stalled = stalled_operations(evidence, self.blocked)
        """Ranks that wait for no other rank, and whose operation does not return."""
        self._is_reached = np.zeros(len(first), dtype=bool)
        """Operations that a certain wait leads to."""
        self._least: dict[int, tuple[int, int]] = {}
        self._issued: dict[int, IssuedOp] = {}
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
        places = [place for place in self._missed[rank].tolist() if self._is_reached[place]]
        lines: dict[str, IssuedOp] = {}
        for place in sorted(places, key=self._least_progress):
            issued = self._issued_at(place)
            lines.setdefault(issued.line, issued)
        return list(lines.values())

    def _issued_at(self, place: int) -> IssuedOp:
        if place not in self._issued:
            self._issued[place] = self._evidence.table.issued_op(int(self._operations[place]))
        return self._issued[place]

    def _least_progress(self, place: int) -> tuple[tuple[int, int], str, int]:
        if place not in self._least:
            columns, ranks = self._evidence.columns, self._waiting[place]
            steps = columns.step[ranks]
            operations = columns.operation[ranks[steps == steps.min()]]
            self._least[place] = int(steps.min()), int(operations.min())
        issued = self._issued_at(place)
        return self._least[place], issued.line, issued.number

    def inside(self, cycle: Sequence[int]) -> dict[int, IssuedOp]:
        """Return the operation in which each rank of a cycle waits for another rank of it."""
        ranks = set(cycle)
        return {
            rank: next(
                self._issued_at(place)
                for place in self._waits[rank].tolist()
                if not ranks.isdisjoint(self._targets[place].tolist())
            )
            for rank in cycle
        }

    def waiters(self, ranks: Iterable[int]) -> set[int]:
        """Return the other ranks that wait for one of ``ranks``, directly or indirectly."""
        named = list(ranks)
        waiting, _ = _followed(np.array(named, np.int64), self._missed, self._waiting)
        waiting[named] = False
        return set(np.flatnonzero(waiting & self.blocked).tolist())

    def _after(self, node: _Node) -> list[_Node]:
        found: list[_Node] = self._targets[~node].tolist() if node < 0 else (~self._waits[node]).tolist()
        return found

    def _find_roots(self) -> None:
        """Find the strongly connected components that no edge leaves.

        Most are a rank that waits for nobody. The nodes from which no such rank is reached are few, and only
        they are searched one by one.
        """
        waited_in = np.zeros_like(self._is_reached)
        waited_in[self._waits.take(np.flatnonzero(self.blocked))] = True
        self._is_reached, is_needed = _followed(np.flatnonzero(waited_in), self._targets, self._waits)
        self._is_reached |= waited_in
        free = np.flatnonzero(is_needed & (self._waits.lengths == 0))
        self.sources = free.tolist()
        _, explained = _followed(free, self._missed, self._waiting)
        starts = ~np.flatnonzero(self._is_reached & ~explained)
        for component in _components(starts.tolist(), self._after):
            inside = set(component)
            if any(after not in inside for node in component for after in self._after(node)):
                continue
            ranks = sorted(node for node in component if node >= 0)
            unsure = [rank for rank in ranks if not self.blocked[rank]]
            self.sources += unsure
            if not unsure and not self.stalled.ranks[ranks].any():
                self.cycles.append(tuple(ranks))
        # Sources without a stack that make up a whole line, all equally far, may be in a stalled operation.
        self.stalled.add(stalled_together(self._evidence, self.sources))
        self.sources = sorted(rank for rank in self.sources if not self.stalled.ranks[rank])
        self.cycles.sort()


def _followed(start: Ints, edges: Rows, back: Rows) -> tuple[Bools, Bools]:
    """Follow ``edges`` from ``start`` to nodes of another kind, and ``back`` from those to the first kind.

    Return which nodes of the first kind are reached again, and which of the other kind.
    """
    again, other = np.zeros(len(edges.starts) - 1, dtype=bool), np.zeros(len(back.starts) - 1, dtype=bool)
    frontier = start
    while frontier.size:
        new = np.zeros_like(other)
        new[edges.take(frontier)] = True
        new &= ~other
        other |= new
        before = again.copy()
        again[back.take(np.flatnonzero(new))] = True
        frontier = np.flatnonzero(again & ~before)
    return again, other


def _waits(evidence: HangEvidence) -> tuple[Ints, Ints, Bools]:
    """Return ranks and the operations they wait in, and which ranks certainly wait. See [Note: Waiting]."""
    columns, last, table = evidence.columns, evidence.columns.last_event, evidence.table
    has_last = last != NOTHING
    dead = columns.answered & ~columns.running & has_last
    at_last = columns.running & (columns.waiting == NOTHING) & has_last
    at_last[at_last] = evidence.are_open(last[at_last])
    dead_in_open = dead.copy()
    dead_in_open[dead] = evidence.are_open(last[dead])
    in_last = np.flatnonzero(dead_in_open | at_last)
    posted, rows = evidence.open, evidence.open_row
    whose, on_device = table.row_rank[rows], table.entered[rows] != NOTHING
    by_host = (columns.running & (columns.waiting != 0) & ~at_last)[whose] & ~on_device
    by_device = columns.running[whose] & on_device & (table.numbers(posted, rows) <= table.entered[rows])
    shown = by_host | by_device
    ranks = np.concatenate([in_last, whose[shown]])
    operations = np.concatenate([last[in_last], posted[shown]])
    order = np.lexsort((table.order[operations], ranks))
    is_certain = dead | at_last | (columns.waiting == 1)
    is_certain[whose[by_device]] = True
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
