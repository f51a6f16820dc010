"""Who waits for whom, and who is behind it all (paper, section 7; DESIGN.md, "Who is to blame for a hang").

A rank waits in an operation, and an operation waits for the members it misses. Operations are nodes of
the graph, so that a line costs as many edges as it has members, however many of them wait. Whoever is
late is not compared with anybody: these edges are causal, and name a rank in a group of any size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torchscout.decision.held import held, held_together
from torchscout.decision.progress import Issued, Process
from torchscout.decision.roll_call import RollCall

__all__ = ["Operation", "WaitGraph"]

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
# [Note: Deaths]
#
# A rank that is gone or stopped is behind whatever misses it, unless it died waiting for somebody who
# had died before: a lost connection ends one trainer after the other. A living rank is no such excuse.


class Operation(NamedTuple):
    """Something that is waited in."""

    line: str
    number: int
    by_dead: bool = False
    """The waiting ranks are dead, and only others who died before them count."""


_Node = int | Operation


class WaitGraph:
    """The waits of one round."""

    def __init__(self, call: RollCall) -> None:
        self.blocked: set[int] = set()
        """Ranks that wait for somebody for certain."""
        self.sources: list[int] = []
        """Ranks that others wait for and that wait for nobody, ascending."""
        self.cycles: list[tuple[int, ...]] = []
        """Ranks that wait for each other and for nobody else."""
        self._call = call
        self._issued: dict[Operation, Issued] = {}
        self._waits: dict[int, list[Operation]] = {}
        self._targets: dict[Operation, tuple[int, ...]] = {}
        self._reached: set[_Node] = set()
        self._least: dict[Operation, tuple[int, int]] = {}
        for rank in sorted(call.standings):
            self._add(rank)
        self.held = held(call, self.blocked)
        """Who does not wait for anybody and does not return either."""
        self._find_roots()
        self._waiting_on = self._reversed()

    def missing(self, rank: int) -> list[Issued]:
        """The operations that hold somebody up and miss ``rank``, one of each line, the most telling first:
        that of the ranks which came least far, and so the one it should have come to next."""
        found = [node for node in self._waiting_on[rank] if isinstance(node, Operation)]
        found = sorted(filter(self._reached.__contains__, found), key=self._least_progress)
        lines: dict[str, Issued] = {}
        for operation in found:
            lines.setdefault(operation.line, self._issued[operation])
        return list(lines.values())

    def _least_progress(self, operation: Operation) -> tuple[tuple[int, int], Operation]:
        if operation not in self._least:
            ranks = (node for node in self._waiting_on[operation] if isinstance(node, int))
            known = (each for rank in ranks if (each := self._call.progress(rank)) is not None)
            self._least[operation] = min(progress.coordinate for progress in known)
        return self._least[operation], operation

    def inside(self, cycle: Sequence[int]) -> dict[int, Issued]:
        """Which operation each rank of a cycle waits for the others in."""
        ranks = set(cycle)
        return {
            rank: next(
                self._issued[each] for each in self._waits[rank] if not ranks.isdisjoint(self._targets[each])
            )
            for rank in cycle
        }

    def waiters(self, ranks: Iterable[int]) -> set[int]:
        """Everybody who waits for one of ``ranks``, directly or not, other than they themselves."""
        reached: set[_Node] = set(ranks)
        frontier, named = list(reached), frozenset(reached)
        while frontier:
            new = [node for node in self._waiting_on[frontier.pop()] if node not in reached]
            reached.update(new)
            frontier.extend(new)
        return {node for node in reached - named if isinstance(node, int)} & self.blocked

    def _add(self, rank: int) -> None:
        """See [Note: Waiting]."""
        call, standing = self._call, self._call.standings[rank]
        last = call.last_event(rank)
        if standing.process is not Process.RUNNING:
            self._wait(rank, [last] if last else [], certain=True, by_dead=True)
        elif standing.waiting is None and last and call.missing(last.line, last.number):
            self._wait(rank, [last], certain=True)
        elif standing.waiting is not False:
            self._wait(rank, call.recent(rank), certain=standing.waiting is True)

    def _wait(self, rank: int, issued: Iterable[Issued], *, certain: bool, by_dead: bool = False) -> None:
        for each in issued:
            operation = Operation(each.line, each.number, by_dead)
            if operation not in self._targets:
                self._targets[operation] = self._missed_by(operation)
            if self._targets[operation]:
                self._issued.setdefault(operation, each)
                self._waits.setdefault(rank, []).append(operation)
        if certain and rank in self._waits:
            self.blocked.add(rank)

    def _missed_by(self, operation: Operation) -> tuple[int, ...]:
        call, (line, number, by_dead) = self._call, operation
        missing = call.missing(line, number)
        if by_dead:  # See [Note: Deaths].
            return tuple(rank for rank in missing if rank in call.dead and call.issued(rank, line) < number)
        return missing

    def _after(self, node: _Node) -> Sequence[_Node]:
        return self._targets[node] if isinstance(node, Operation) else self._waits.get(node, ())

    def _find_roots(self) -> None:
        """What all waiting comes down to: the parts of the graph that no edge leaves."""
        for component in _components(sorted(self.blocked), self._after):
            inside = set(component)
            self._reached |= inside
            if any(after not in inside for node in component for after in self._after(node)):
                continue
            ranks = sorted(node for node in component if isinstance(node, int))
            free = [rank for rank in ranks if rank not in self.blocked]
            self.sources += free
            if not free and self.held.ranks.isdisjoint(ranks):
                self.cycles.append(tuple(ranks))
        # Sources without a stack that are all members of a line, equally far, may as well be held in it.
        self.held.add(held_together(self._call, self.sources))
        self.sources = sorted(rank for rank in self.sources if rank not in self.held.ranks)
        self.cycles.sort()

    def _reversed(self) -> dict[_Node, list[_Node]]:
        before: dict[_Node, list[_Node]] = defaultdict(list)
        for rank, operations in self._waits.items():
            for operation in operations:
                before[operation].append(rank)
        for operation, targets in self._targets.items():
            for rank in targets:
                before[rank].append(operation)
        return before


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
