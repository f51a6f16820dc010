"""Who is inside an operation that all have entered and that does not return (paper, section 7).

Nobody is behind there, so nobody can be blamed: the paper's group-scoped runtime or transport stall.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchscout.decision.columns import NOTHING, Bools, Ints
from torchscout.decision.progress import Issued
from torchscout.decision.roll_call import RollCall

__all__ = ["Held", "held", "held_together"]

# [Note: Held]
#
# A rank whose stack is in a wait, and whose operations miss nobody, is *held*. Where there is no stack,
# or some posted operation misses members as well, only the company shows it: all members that answered
# stand at the very same operation. If some of them went on, the operation is over, and the rank is
# busy, or waits, elsewhere. Where devices enter operations, the company is of devices: all of them came to
# that operation last, and all have work left.


@dataclass(slots=True)
class Held:
    """Ranks that wait for an operation rather than for a rank."""

    lines: dict[str, Issued]
    """The lines they are held in, with the operation."""
    ranks: Bools

    def add(self, other: Held) -> None:
        self.lines |= other.lines
        self.ranks = self.ranks | other.ranks


def held(call: RollCall, blocked: Bools) -> Held:
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
    found.add(Held(_by_line(call, chosen[alone]), inside))
    return found


def held_together(call: RollCall, ranks: Sequence[int]) -> Held:
    """Those of ``ranks``, none of which waits for another, that have no stack and are all of a line."""
    columns = call.columns
    unsure = np.zeros_like(columns.running)
    unsure[ranks] = True
    unsure &= columns.running & (columns.waiting == NOTHING) & ~columns.has_device
    theirs = unsure[columns.recent_rank] & call.whole_lines(unsure)[columns.line[columns.recent]]
    together = np.zeros_like(unsure)
    together[columns.recent_rank[theirs]] = True
    return Held(_by_line(call, columns.recent[theirs]), together)


def _in_company(call: RollCall) -> Held:
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
    return Held(_by_line(call, shown[complete]), inside)


def _by_line(call: RollCall, operations: Ints) -> dict[str, Issued]:
    """The last of ``operations`` on each line."""
    last = np.full(len(call.lines), NOTHING)
    last[call.columns.line[operations]] = operations
    shown = (call.columns.operations[operation] for operation in last[last != NOTHING].tolist())
    return {each.line: each for each in shown}
