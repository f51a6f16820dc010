"""Who is inside an operation that all have entered and that does not return (paper, section 7).

Nobody is behind there, so nobody can be blamed: the paper's group-scoped runtime or transport stall.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torchscout.decision.progress import Issued, Process
from torchscout.decision.roll_call import RollCall

__all__ = ["Held", "held", "held_together"]

# [Note: Held]
#
# A rank whose stack is in a wait, and whose operations miss nobody, is *held*. Where there is no stack,
# or some posted operation misses members as well, only the company shows it: all members that answered
# stand at the very same operation. If some of them went on, the operation is over, and the rank is
# busy, or waits, elsewhere.


@dataclass(slots=True)
class Held:
    """Ranks that wait for an operation rather than for a rank."""

    lines: dict[str, Issued] = field(default_factory=dict)
    """The lines they are held in, with the operation."""
    ranks: set[int] = field(default_factory=set)

    def add(self, other: Held) -> None:
        self.lines |= other.lines
        self.ranks |= other.ranks


def held(call: RollCall, blocked: Collection[int]) -> Held:
    """See [Note: Held]; ``blocked`` ranks are known to wait for somebody."""
    engaged = sorted(filter(call.in_communication, call.standings))
    found = _in_company(call, engaged)
    alone = [
        rank
        for rank in engaged
        if call.standings[rank].waiting and rank not in blocked and rank not in found.ranks
    ]
    alone = [rank for rank in alone if call.newest(rank) is not None]
    found.ranks.update(alone)
    whole = _whole_lines(call, alone, found.ranks)
    for rank in alone:
        # Of all it has posted, rather an operation whose members are all held than simply the last.
        recent = call.recent(rank)
        issued = next((each for each in reversed(recent) if each.line in whole), recent[-1])
        found.lines[issued.line] = issued
    return found


def held_together(call: RollCall, ranks: Iterable[int]) -> Held:
    """Those of ``ranks``, none of which waits for another, that have no stack and are all of a line."""
    unsure = {rank for rank in ranks if _may_wait(call, rank)}
    whole, found = _whole_lines(call, unsure, unsure), Held()
    for rank in sorted(unsure):
        for each in call.recent(rank):
            if each.line in whole:
                found.lines[each.line] = each
                found.ranks.add(rank)
    return found


def _in_company(call: RollCall, engaged: Iterable[int]) -> Held:
    company: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank in engaged:
        if (last := call.last_event(rank)) is not None:
            company[last.line, last.number].append(rank)
    found = Held()
    for (line, number), inside in company.items():
        if len(inside) == len(call.answered(line)) and not call.missing(line, number):
            found.lines[line] = call.recent(inside[0])[-1]
            found.ranks.update(inside)
    return found


def _whole_lines(call: RollCall, ranks: Iterable[int], inside: set[int]) -> set[str]:
    """Lines that ``ranks`` have used and of which everybody who answered is ``inside``."""
    used = {each.line for rank in ranks for each in call.recent(rank)}
    return {line for line in used if inside.issuperset(call.answered(line))}


def _may_wait(call: RollCall, rank: int) -> bool:
    standing = call.standings.get(rank)
    return standing is not None and standing.process is Process.RUNNING and standing.waiting is None
