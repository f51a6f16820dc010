"""Which rank waits for which, and which one the whole job waits for (paper, section 7).

A rank waits in an operation, and an operation waits for the members that have not entered it. Operations
are nodes of the graph, so that a line costs as many edges as it has members, however many of them wait.
These edges are causal: they name a rank in a group of any size, without comparing it with others.

An operation that all members have entered and that does not return (``held``) is a stall of the runtime or
the transport. No rank is behind there, so it is attributed to the process group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchscout.decision.hang.evidence import NOTHING, Bools, HangEvidence, Ints, Rows
from torchscout.decision.progress import IssuedOp

__all__ = ["Operation", "Stalled", "WaitGraph", "held_together", "stalled_operations"]

# [Note: Held]
#
# A rank whose stack is in a wait, and whose operations miss nobody, is *held*. Where there is no stack,
# or some posted operation misses members as well, only the company shows it: all members that answered
# stand at the very same operation. If some of them went on, the operation is over, and the rank is
# busy, or waits, elsewhere. Where devices enter operations, the company is of devices: all of them came to
# that operation last, and all have work left.


@dataclass(slots=True)
class Stalled:
    """Ranks that wait for an operation rather than for a rank."""

    lines: dict[str, IssuedOp]
    """The lines they are held in, with the operation."""
    ranks: Bools

    def add(self, other: Stalled) -> None:
        self.lines |= other.lines
        self.ranks = self.ranks | other.ranks


def stalled_operations(call: HangEvidence, blocked: Bools) -> Stalled:
    """See [Note: Held]; ``blocked`` ranks are known to wait for somebody."""
    columns = call.columns
    found = _in_company(call)
    # A host that waits for its device waits in no communication of its own.
    alone = (
        (columns.waiting == 1) & ~blocked & ~found.ranks & (columns.newest != NOTHING) & ~columns.has_device
    )
    inside = found.ranks | alone
    shown = alone[columns.recent_rank]
    operations, ranks = columns.recent[shown], columns.recent_rank[shown]
    # Of all it has posted, rather an operation whose members are all held than simply the last.
    in_whole = call.whole_lines(inside)[columns.line[operations]]
    chosen = columns.newest.copy()
    chosen[ranks[in_whole]] = operations[in_whole]  # of several of one rank, the last one stays
    found.add(Stalled(_by_line(call, chosen[alone]), inside))
    return found


def held_together(call: HangEvidence, ranks: Sequence[int]) -> Stalled:
    """Those of ``ranks``, none of which waits for another, that have no stack and are all of a line."""
    columns = call.columns
    unsure = np.zeros_like(columns.running)
    unsure[ranks] = True
    unsure &= columns.running & (columns.waiting == NOTHING) & ~columns.has_device
    theirs = unsure[columns.recent_rank] & call.whole_lines(unsure)[columns.line[columns.recent]]
    together = np.zeros_like(unsure)
    together[columns.recent_rank[theirs]] = True
    return Stalled(_by_line(call, columns.recent[theirs]), together)


def _in_company(call: HangEvidence) -> Stalled:
    columns = call.columns
    on_device = columns.running & (columns.device_busy == 1) & ~columns.captured
    last = np.where(on_device, columns.last_entered, columns.last_event)
    ranks = np.flatnonzero((call.in_communication | on_device) & (last != NOTHING))
    operations = last[ranks]
    _, first, company, sizes = np.unique(
        columns.place[operations], return_index=True, return_inverse=True, return_counts=True
    )
    shown = operations[first]
    complete = (sizes == call.answered[columns.line[shown]]) & ~call.is_open[shown]
    inside = np.zeros_like(columns.running)
    inside[ranks[complete[company]]] = True
    return Stalled(_by_line(call, shown[complete]), inside)


def _by_line(call: HangEvidence, operations: Ints) -> dict[str, IssuedOp]:
    """The last of ``operations`` on each line."""
    last = np.full(len(call.lines), NOTHING)
    last[call.columns.line[operations]] = operations
    shown = (call.columns.operations[operation] for operation in last[last != NOTHING].tolist())
    return {each.line: each for each in shown}


# [Note: Waiting]
#
# A rank is *blocked* when its stack is in a wait, or, where there is no stack, when the last thing it
# announced is an operation that misses members. A stack in a wait does not say which of the posted
# operations it waits for, so each of them that misses members makes an edge.
#
# A rank that has only posted operations, and went on to something else, is not blocked. With a stack
# that shows it working it has no edges. Without a stack it might wait or work: it keeps edges to what
# it has posted, but never begins a wait by them, and a cycle it is part of is not a deadlock: everybody
# else there waits, so it is the one that does not. This is the stage that posted a receive early and
# then sleeps.
#
# Where a device enters the operations (NCCL), the host issues them and runs ahead, until it stops somewhere
# that no stack explains. There the device's own progress decides, whatever the host is doing: a rank waits in
# every operation that its device has entered and that misses members, and an operation misses everybody
# whose device has not entered it.
#
# [Note: Deaths]
#
# A rank that is gone or stopped is behind whatever misses it, unless it died waiting for somebody who
# had died before: a lost connection ends one trainer after the other. A living rank is no such excuse.


class Operation(NamedTuple):
    """Something that is waited in."""

    line: str
    number: int
    by_dead: bool
    """The waiting ranks are dead, and only others who died before them count."""


_Node = int
"""A rank, or, below zero, ``~place`` of an operation in the list of those that are waited in."""


class WaitGraph:
    """The waits of one round."""

    def __init__(self, call: HangEvidence) -> None:
        self._call = call
        ranks, operations, is_certain = _waits(call)
        self._operations: list[Operation] = []
        self._issued: list[IssuedOp] = []
        self._targets: list[list[int]] = []
        places = self._add(operations, ~call.columns.running[ranks])
        misses = np.array([bool(targets) for targets in self._targets], dtype=bool)[places]
        ranks, places = ranks[misses], places[misses]
        self._waits = Rows.grouped(ranks, places, len(call.columns.running))
        self._waiting = Rows.grouped(places, ranks, len(self._operations))
        self.blocked: Bools = (np.diff(self._waits.starts) > 0) & is_certain
        """Ranks that wait for somebody for certain."""
        self.held = stalled_operations(call, self.blocked)
        """Who does not wait for anybody and does not return either."""
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
        """The operations that hold somebody up and miss ``rank``, one of each line, the most telling first:
        that of the ranks which came least far, and so the one it should have come to next."""
        places = [place for place in self._missed.get(rank, ()) if ~place in self._reached]
        lines: dict[str, IssuedOp] = {}
        for place in sorted(places, key=self._least_progress):
            lines.setdefault(self._operations[place].line, self._issued[place])
        return list(lines.values())

    def _least_progress(self, place: int) -> tuple[tuple[int, int], Operation]:
        if place not in self._least:
            columns, ranks = self._call.columns, self._waiting[place]
            steps = columns.step[ranks]
            operations = columns.operation[ranks[steps == steps.min()]]
            self._least[place] = int(steps.min()), int(operations.min())
        return self._least[place], self._operations[place]

    def inside(self, cycle: Sequence[int]) -> dict[int, IssuedOp]:
        """Which operation each rank of a cycle waits for the others in."""
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
        """Everybody who waits for one of ``ranks``, directly or not, other than they themselves."""
        named = list(ranks)
        waiting = np.zeros_like(self.blocked)
        reached, frontier, followed = set(named), list(named), set[int]()
        while frontier:
            for place in self._missed.get(frontier.pop(), ()):
                if place not in followed:
                    followed.add(place)
                    waiting[self._waiting[place]] = True
                    # Most of them are missed nowhere, and lead no further.
                    new = self._missed.keys() & set(self._waiting[place].tolist()) - reached
                    reached |= new
                    frontier += new
        waiting[named] = False
        return set(np.flatnonzero(waiting & self.blocked).tolist())

    def _add(self, operations: Ints, by_dead: Bools) -> Ints:
        """The place of each; the dead wait apart from the others."""
        columns = self._call.columns
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
        call, issued = self._call, self._call.columns.operations[operation]
        missing = call.missing(operation)
        if by_dead:  # See [Note: Deaths].
            ranks, counts = call.issued_by(issued.line)
            missing = ranks[call.is_dead[ranks] & (counts < issued.number)]
        found: list[int] = missing.tolist()
        return found

    def _after(self, node: _Node) -> list[_Node]:
        return self._targets[~node] if node < 0 else (~self._waits[node]).tolist()

    def _find_roots(self) -> None:
        """What all waiting comes down to: the parts of the graph that no edge leaves."""
        # Not from the waiting ranks themselves: those that nobody waits for, which are most, are no root.
        waited_in = self._waits.values[np.repeat(self.blocked, np.diff(self._waits.starts))]
        for component in _components((~np.unique(waited_in)).tolist(), self._after):
            inside = set(component)
            self._reached |= inside
            if any(after not in inside for node in component for after in self._after(node)):
                continue
            ranks = sorted(node for node in component if node >= 0)
            free = [rank for rank in ranks if not self.blocked[rank]]
            self.sources += free
            if not free and not self.held.ranks[ranks].any():
                self.cycles.append(tuple(ranks))
        # Sources without a stack that are all members of a line, equally far, may as well be held in it.
        self.held.add(held_together(self._call, self.sources))
        self.sources = sorted(rank for rank in self.sources if not self.held.ranks[rank])
        self.cycles.sort()


def _waits(call: HangEvidence) -> tuple[Ints, Ints, Bools]:
    """Who waits in which operation that misses members, by rank; and whose wait is certain.

    See [Note: Waiting].
    """
    columns, last = call.columns, call.columns.last_event
    has_last = last != NOTHING
    dead = columns.answered & ~columns.running & has_last
    at_last = columns.running & (columns.waiting == NOTHING) & has_last
    at_last[at_last] = call.is_open[last[at_last]]
    in_last = np.flatnonzero(dead | at_last)
    by_host = (columns.running & (columns.waiting != 0) & ~at_last)[columns.recent_rank] & ~columns.on_device
    by_device = columns.running[columns.recent_rank] & columns.has_entered
    by_device &= call.is_open[columns.recent]
    ranks = np.concatenate([in_last, columns.recent_rank[by_host | by_device]])
    operations = np.concatenate([last[in_last], columns.recent[by_host | by_device]])
    ranks, operations = ranks[call.is_open[operations]], operations[call.is_open[operations]]
    order = np.argsort(ranks, kind="stable")
    is_certain = dead | at_last | (columns.waiting == 1)
    is_certain[columns.recent_rank[by_device]] = True
    return ranks[order], operations[order], is_certain


def _components(starts: Iterable[_Node], after: Callable[[_Node], Iterable[_Node]]) -> Iterator[list[_Node]]:
    """Strongly connected components of what ``starts`` reach (Tarjan), without recursion."""
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
