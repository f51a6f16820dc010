"""Who keeps the copy of whose state: always on another machine, if there is one (paper, section 8).

Pure, from the list of hosts alone, which all ranks know: so all come to the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SNAPSHOTS", "copies_beside", "held_ranks", "replica_holders"]

SNAPSHOTS = 3
"""Snapshots in memory: two whole ones, and one that is being written."""
_REPLICAS = 4
"""Of another rank's: two whole ones, one that is still going to files, and one that is arriving."""

# [Note: a ring, unless one machine outweighs the others]
#
# Put the ranks in a row, machine by machine, the largest machine first, and let everybody's copy lie with
# whoever stands further on by as many places as that machine has ranks, around the ring. No machine is wider
# than that, so the copy is past the own machine; and if the machine has at most half of all ranks, going
# around does not lead back into it either. Everybody then holds exactly one copy, and machines of equal size
# hold for each other as whole machines: two that fail lose state only if they are neighbours.
#
# A machine with more than half of the ranks has too few others to go around: they take equal shares of it.


def replica_holders(hosts: Sequence[str]) -> dict[int, int | None]:
    """For each rank the one that holds its copy, given each rank's host; None where there is one host."""
    machines: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        machines.setdefault(host, []).append(rank)
    if len(machines) < 2:
        return dict.fromkeys(range(len(hosts)), None)
    largest, *others = sorted(machines.values(), key=len, reverse=True)  # stable: equals by their first rank
    rest = [rank for machine in others for rank in machine]
    row, shift = largest + rest, len(largest)
    if shift <= len(rest):
        return {rank: row[(place + shift) % len(row)] for place, rank in enumerate(row)}
    found: dict[int, int | None] = {rank: rest[place % len(rest)] for place, rank in enumerate(largest)}
    return found | dict(zip(rest, largest, strict=False))


def held_ranks(hosts: Sequence[str], rank: int) -> tuple[int, ...]:
    """Whose copies this rank holds."""
    return tuple(sorted(ward for ward, holder in replica_holders(hosts).items() if holder == rank))


def copies_beside(hosts: Sequence[str], rank: int, *, replicate: bool) -> int:
    """Of one rank's state, as many as this rank's machine may have to hold at once, for all its ranks."""
    beside = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    held = sum(len(held_ranks(hosts, each)) for each in beside) if replicate else 0
    return SNAPSHOTS * len(beside) + _REPLICAS * held
