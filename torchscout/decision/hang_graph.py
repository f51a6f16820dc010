"""Which rank waits for which, and which ranks the whole job waits for (paper, section 7).

A rank waits in an operation, and an operation waits for the members that have not entered it. These edges are
causal: they name a rank in a group of any size, without a vote. If all members have entered an operation and
it does not return, it has *stalled* in the runtime or the transport, and no rank is behind there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torchscout.decision.progress import CommGroup, IssuedOp, Process, RankReport

__all__ = ["Evidence", "Place", "WaitGraph"]

Place = tuple[str, int]
"""One operation: the key of its group, and its number there."""
_EVERYTHING = 1 << 63
"""More than any report may say."""

# [Note: Absence]
#
# A rank of a *lost* machine has issued nothing that others still wait for. Any other rank that does not
# answer is merely *unheard*: it must not be blamed for a hang that another rank explains, so it is assumed to
# have issued everything. If nothing else explains a wait, either the rank is the cause, or its report was
# lost and an operation has stalled that it has entered. Both look the same to all other ranks, so the group
# is reported with the rank that is absent, and nobody is named.


class Evidence:
    """What the ranks that answered have reported, and what absence means."""

    def __init__(
        self, reports: Mapping[int, RankReport], lost: Iterable[int] = (), unheard: Iterable[int] = ()
    ) -> None:
        """``lost`` and ``unheard``: ranks that did not answer; see [Note: Absence]."""
        self.reports = reports
        self.lost, self.unheard = frozenset(lost), frozenset(unheard)
        self.groups: dict[str, CommGroup] = {}
        """Groups of several members, by key."""
        for report in reports.values():
            for group in report.groups:
                if len(group.members) > 1:
                    self.groups.setdefault(group.key, group)
        self.halted = {rank for rank, each in reports.items() if each.process is not Process.RUNNING}
        """Ranks that answered, and whose trainers are gone or stopped."""
        self.dead = self.halted | self.lost
        """Ranks that will not issue another operation."""
        self.last = {rank: self._last_of(each) for rank, each in reports.items()}
        """The operation that each rank may be in: on the host the newest one, if nothing was published since;
        for a rank that is gone or stopped, the last one that its device entered."""
        self._lost_reached: dict[str, int] = {}
        self._by_all: dict[str, int] = {}

    def _last_of(self, report: RankReport) -> Place | None:
        progress = report.progress
        if progress is None:
            return None
        newest = self.known(progress.recent.newest)
        if newest is not None and progress.at_communication and newest[0] not in progress.entered:
            return newest
        return None if report.process is Process.RUNNING else self.last_entered(report.rank)

    def last_entered(self, rank: int) -> Place | None:
        """Return the last operation that the device of ``rank`` has reached."""
        progress = self.reports[rank].progress
        if progress is None or not progress.entered:
            return None
        return self.known(progress.recent.last_entered(progress.entered))

    def known(self, place: Place | None) -> Place | None:
        """Return the place if its group has several members."""
        return place if place is not None and place[0] in self.groups else None

    def issued(self, rank: int, group: str) -> int:
        """Return how many operations of a group ``rank`` has issued; -1 if it did not answer."""
        if rank not in self.reports:
            return -1
        progress = self.reports[rank].progress
        return 0 if progress is None else progress.issued.get(group, 0)

    def came_to(self, rank: int, group: str) -> int:
        """Return how many operations of a group ``rank`` has entered, on its device if it has one, counting
        the one in which it may have died."""
        issued, report = self.issued(rank, group), self.reports.get(rank)
        progress = None if report is None else report.progress
        return issued if progress is None else min(issued, progress.entered.get(group, issued))

    def reached(self, rank: int, group: str) -> int:
        """Return how many operations of a group a member has entered or, as far as is known, will enter."""
        report = self.reports.get(rank)
        if report is None:
            return self._reached_by_lost(group) if rank in self.lost else _EVERYTHING
        progress = report.progress
        if progress is None:
            return 0
        number = progress.issued.get(group, 0)
        if rank in self.halted and (last := self.last[rank]) is not None and last[0] == group:
            number -= 1  # it died in that operation, or before it
        # A device may not have reached what its host has issued; other members wait for the device.
        return min(number, progress.entered.get(group, number))

    def _reached_by_lost(self, group: str) -> int:
        """Assume that ranks of lost machines had come as far as everybody, but not to what others wait in."""
        if group not in self._lost_reached:
            members = [rank for rank in self.groups[group].members if rank in self.reports]
            waited_in = [last[1] for rank in members if (last := self.last[rank]) and last[0] == group]
            furthest = max((self.reached(rank, group) for rank in members), default=0)
            self._lost_reached[group] = min(waited_in, default=furthest) - 1
        return self._lost_reached[group]

    def reached_by_all(self, group: str) -> int:
        """Return how many operations of a group all of its members have entered."""
        if group not in self._by_all:
            self._by_all[group] = min(self.reached(rank, group) for rank in self.groups[group].members)
        return self._by_all[group]

    def is_open(self, place: Place) -> bool:
        """Whether the operation misses members."""
        return place[1] > self.reached_by_all(place[0])

    def answered(self, group: str) -> list[int]:
        """The members of a group that answered."""
        return [rank for rank in self.groups[group].members if rank in self.reports]

    def operation(self, place: Place, ranks: Iterable[int]) -> IssuedOp:
        """Return the operation at ``place`` as one of ``ranks`` shows it."""
        group, number = place
        for rank in ranks:
            report = self.reports.get(rank)
            for each in () if report is None or report.progress is None else report.progress.recent.of(group):
                if each.number == number:
                    return each
        return IssuedOp(group, number, 0, 0, "an operation")


# [Note: Waiting]
#
# A rank is *blocked* if its stack is in a wait or, without a stack, if the last thing it announced is an
# operation that misses members. A stack in a wait does not show which of the posted operations it waits for,
# so every one that misses members becomes an edge.
#
# A rank that only posted operations and went on is not blocked. If a stack shows it working, it has no
# edges. Without a stack we cannot tell. Such a rank passes blame on (its posted operations are edges) but is
# not itself a victim, and a cycle through it is no deadlock. An example is a stage that posts a receive early
# and sleeps.
#
# Where a device enters the operations (NCCL), the host issues them and runs ahead until it blocks in a call
# that no stack explains. There the progress of the device decides, whatever the host is doing: a rank waits
# in the operation that its device has entered and that misses members, and an operation misses every member
# whose device has not entered it.
#
# [Note: Deaths]
#
# A rank that is gone or stopped is the source of every wait for it, unless it died waiting for a rank that
# had died before: a lost connection ends one trainer after the other. Waiting for a living rank is no excuse.
#
# [Note: Stalled]
#
# A rank whose stack is in a wait, and whose operations all members have entered, is in a stalled operation.
# Without a stack, or if another posted operation misses members, only the other members show it: all that
# answered are at the same operation. Where devices enter operations, devices are compared: all of them
# reached that operation last, and all have work left.


class _Wait:
    """An operation that ranks wait in; those of dead and of living ranks are kept apart."""

    __slots__ = ("missing", "place", "ranks")

    def __init__(self, place: Place, missing: list[int]) -> None:
        self.place = place
        self.missing = missing
        """The members without which it cannot finish."""
        self.ranks: list[int] = []
        """Those that wait in it."""


class WaitGraph:
    """The waits of one round."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._waits: dict[int, list[_Wait]] = {}
        """Rank -> what it waits in, the most likely first."""
        self._missed: dict[int, list[_Wait]] = defaultdict(list)
        """Rank -> the operations that do not finish without it."""
        self._nodes: dict[tuple[str, int, bool], _Wait] = {}
        self.blocked: set[int] = set()
        """Ranks that certainly wait for another rank."""
        self.stalled: dict[str, Place] = {}
        """Group -> an operation that all members have entered, and that does not return."""
        self.in_stalled: set[int] = set()
        """Ranks that wait for no other rank, and whose operation does not return."""
        self.unclear: set[int] = set()
        """Those of them that may as well be stuck in their own code."""
        self.sources: list[int] = []
        """Ranks that others wait for and that wait for nobody, ascending."""
        self.cycles: list[tuple[int, ...]] = []
        """Ranks that wait for each other and for nobody else."""
        self._reached: set[_Wait] = set()
        """Operations that a certain wait leads to."""
        for rank, report in evidence.reports.items():
            self._add(rank, report)
        self._find_stalled()
        self._find_roots()

    def waits(self, rank: int) -> bool:
        """Whether ``rank`` waits for another rank, or may do so."""
        return rank in self._waits

    def missing(self, rank: int) -> list[IssuedOp]:
        """Return the operations that ``rank`` should have entered next, one for each group in which others
        wait for it; the first is the one in which the ranks with the least progress wait."""
        found: dict[str, IssuedOp] = {}
        waits = [each for each in self._missed[rank] if each in self._reached]
        for each in sorted(waits, key=self._least_progress):
            group, number = each.place
            is_known = rank in self._evidence.reports
            own = self._evidence.reached(rank, group) + 1 if is_known else number
            place = group, min(number, max(own, 1))
            found.setdefault(group, self._evidence.operation(place, [*each.ranks[:8], rank]))
        return list(found.values())

    def _least_progress(self, wait: _Wait) -> tuple[tuple[int, int], Place]:
        progresses = (self._evidence.reports[rank].progress for rank in wait.ranks)
        return min(each.coordinate for each in progresses if each is not None), wait.place

    def inside(self, cycle: Sequence[int]) -> dict[int, IssuedOp]:
        """Return the operation in which each rank of a cycle waits for another rank of it."""
        ranks, operations = set(cycle), dict[Place, IssuedOp]()
        found: dict[int, IssuedOp] = {}
        for rank in cycle:
            place = next(wait.place for wait in self._waits[rank] if not ranks.isdisjoint(wait.missing))
            if place not in operations:  # reading it for each of thousands takes seconds
                operations[place] = self._evidence.operation(place, [rank])
            found[rank] = operations[place]
        return found

    def knot(self, cycle: Sequence[int]) -> int | None:
        """Return the one rank of a cycle without which nobody in it would wait in a circle, if there is one.

        It entered an operation that less than half of the members of its group have entered.
        """
        inside, evidence = set(cycle), self._evidence
        # Such a rank is in every circle, so another one at most that a circle without it has in common.
        candidates, found = self._circle(inside), list[int]()
        while candidates:
            rank = candidates.pop()
            if circle := self._circle(inside - {rank}):
                candidates &= circle
            else:
                found.append(rank)
            if (
                len(found) > 1
            ):  # the other one may be as guilty, also with an operation that most have entered
                return None
        is_minority = all(
            2 * sum(evidence.reached(each, group) >= number for each in evidence.groups[group].members)
            < len(evidence.groups[group].members)
            for rank in found
            for group, number in (wait.place for wait in self._waits[rank])
        )
        return found[0] if found and is_minority else None

    def _circle(self, ranks: set[int]) -> set[int]:
        """Return some of ``ranks`` that wait for each other in a circle, or an empty set if there is none.

        A path leads from a rank to an operation in which it waits, and from there to a rank that is missing.
        """
        seen: set[int | _Wait] = set()
        for start in ranks:
            path: dict[int | _Wait, Iterator[int | _Wait]] = (
                {} if start in seen else {start: self._ways(start)}
            )
            while path:
                following = next(path[next(reversed(path))], None)
                if following is None:
                    seen.add(path.popitem()[0])
                elif following in path:
                    nodes = [*path]
                    return {each for each in nodes[nodes.index(following) :] if isinstance(each, int)}
                elif following not in seen and (isinstance(following, _Wait) or following in ranks):
                    path[following] = self._ways(following)
        return set()

    def _ways(self, node: int | _Wait) -> Iterator[int | _Wait]:
        return iter(self._waits.get(node, ()) if isinstance(node, int) else node.missing)

    def waiters(self, ranks: Iterable[int]) -> set[int]:
        """Return the other ranks that wait for one of ``ranks``, directly or indirectly."""
        named = set(ranks)
        explained, _ = self._backwards(named)
        return (explained & self.blocked) - named

    def _add(self, rank: int, report: RankReport) -> None:
        """Note what ``rank`` waits in; see [Note: Waiting]."""
        evidence, progress = self._evidence, report.progress
        if progress is None:
            return
        last, is_dead = evidence.last[rank], rank in evidence.halted
        if is_dead:
            self._wait(rank, [last] if last is not None and evidence.is_open(last) else [], is_dead=True)
            return
        at_last = report.waiting is None and last is not None and evidence.is_open(last)
        places: list[Place] = [last] if last is not None and at_last else []
        is_certain = at_last or report.waiting is True
        is_idle = progress.device_busy is False  # it has finished whatever it has entered
        is_elsewhere = at_last or report.waiting is False
        for group, issued in progress.issued.items():
            on_device = group in progress.entered
            if group not in evidence.groups or (is_idle if on_device else is_elsewhere):
                continue
            number = min(issued, progress.entered.get(group, issued))
            if number > evidence.reached_by_all(group):
                is_certain |= on_device
                places.append((group, number))
        if last in places:
            places.remove(last)
            places.insert(0, last)
        if self._wait(rank, places) and is_certain:
            self.blocked.add(rank)

    def _wait(self, rank: int, places: Iterable[Place], *, is_dead: bool = False) -> bool:
        found = []
        for place in places:
            key = (*place, is_dead)
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = self._node(place, is_dead=is_dead)
            if node.missing:
                node.ranks.append(rank)
                found.append(node)
        if found:
            self._waits[rank] = found
            if is_dead:
                self.blocked.add(rank)
        return bool(found)

    def _node(self, place: Place, *, is_dead: bool) -> _Wait:
        evidence, (group, number) = self._evidence, place
        members = evidence.groups[group].members
        if is_dead:  # see [Note: Deaths]
            missing = [
                each for each in members if each in evidence.dead and evidence.came_to(each, group) < number
            ]
        else:
            missing = [each for each in members if evidence.reached(each, group) < number]
        node = _Wait(place, missing)
        for each in missing:
            self._missed[each].append(node)
        return node

    def _find_stalled(self) -> None:
        """See [Note: Stalled]."""
        evidence, at = self._evidence, defaultdict[Place, list[int]](list)
        for rank, report in evidence.reports.items():
            progress = report.progress
            if progress is None:
                continue
            is_running = report.process is Process.RUNNING
            on_device = is_running and progress.device_busy is True and not progress.captured
            place = evidence.last_entered(rank) if on_device else evidence.last[rank]
            if place is not None and (on_device or report.waiting is not False):
                at[place].append(rank)
        for place, ranks in at.items():
            if len(ranks) == len(evidence.answered(place[0])) and not evidence.is_open(place):
                self._stall(place, ranks)
        # A host that waits for its device does not wait in a communication itself.
        alone = [
            rank
            for rank, each in evidence.reports.items()
            if each.waiting is True
            and rank not in self.blocked
            and rank not in self.in_stalled
            and each.progress is not None
            and not each.progress.entered
            and evidence.known(each.progress.recent.newest)
        ]
        self.in_stalled.update(alone)
        for rank in alone:
            progress = evidence.reports[rank].progress
            assert progress is not None
            # Of all posted operations prefer one whose members are all inside to the last one.
            whole = (
                each for each in reversed(progress.recent) if self._is_whole(each.group, self.in_stalled)
            )
            place = next(((each.group, each.number) for each in whole), progress.recent.newest)
            assert place is not None
            self._stall(place, [rank])

    def _stall(self, place: Place, ranks: Iterable[int]) -> None:
        if place[0] not in self.stalled or place[1] > self.stalled[place[0]][1]:
            self.stalled[place[0]] = place
        self.in_stalled.update(ranks)

    def _is_whole(self, group: str, inside: set[int]) -> bool:
        """Whether all members that answered are ``inside``."""
        return group in self._evidence.groups and inside.issuperset(self._evidence.answered(group))

    def _find_roots(self) -> None:
        """Find the strongly connected components that no edge leaves. Most are a rank that waits for nobody;
        only what leads to no such rank is searched for others."""
        reached = self._followed()
        free = {rank for rank in reached if rank not in self._waits}
        _, operations = self._backwards(free)
        sources = set(free)
        rest = [each for each in self._reached if each not in operations]
        for component in _components(rest, self._after):
            if any(after not in component for node in component for after in self._after(node)):
                continue
            ranks = {node for node in component if isinstance(node, int)}
            unsure = ranks - self.blocked
            sources |= unsure
            if not unsure and ranks.isdisjoint(self.in_stalled):
                self.cycles.append(tuple(sorted(ranks)))
        self._stalled_together(sources)
        self.sources = sorted(sources - self.in_stalled)
        self.cycles.sort()

    def _stalled_together(self, sources: set[int]) -> None:
        """Sources without a stack that make up a whole group may be in a stalled operation."""
        reports = self._evidence.reports
        unsure = {
            rank
            for rank in sources - self._evidence.dead - self._evidence.unheard - self.in_stalled
            if reports[rank].waiting is None
            and (progress := reports[rank].progress) is not None
            and not progress.entered
        }
        for rank in sorted(unsure):
            progress = reports[rank].progress
            for group, number in () if progress is None else progress.recent.last_numbers.items():
                if self._is_whole(group, unsure):
                    self._stall((group, number), [rank])
                    self.unclear.add(rank)

    def _followed(self) -> set[int]:
        """Follow waits from the ranks that are blocked; return the ranks that are waited for."""
        reached, new = set[int](), self.blocked
        while new:
            waits = {each for rank in new for each in self._waits.get(rank, ())} - self._reached
            self._reached |= waits
            new = {rank for each in waits for rank in each.missing} - reached
            reached |= new
        return reached

    def _backwards(self, ranks: Iterable[int]) -> tuple[set[int], set[_Wait]]:
        """Return the ranks that wait for one of ``ranks``, directly or not, and the operations between."""
        found, operations, new = set[int](), set[_Wait](), set(ranks)
        while new:
            waits = {each for rank in new for each in self._missed.get(rank, ())} - operations
            operations |= waits
            new = {rank for each in waits for rank in each.ranks} - found
            found |= new
        return found, operations

    def _after(self, node: _Node) -> Sequence[_Node]:
        return node.missing if isinstance(node, _Wait) else self._waits.get(node, [])


_Node = int | _Wait
"""A rank, or an operation that ranks wait in."""


def _components(  # noqa: C901
    starts: Iterable[_Node], after: Callable[[_Node], Iterable[_Node]]
) -> Iterator[set[_Node]]:
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
                    component = set[_Node]()
                    while node not in component:
                        component.add(stack.pop())
                    stacked -= component
                    yield component
