"""Assigns each rank a holder of its copies, on another machine if there is one (paper, section 8).

A pure function of the list of hosts, so that all ranks compute the same assignment.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SNAPSHOTS", "copies_beside", "held_ranks", "replica_holders"]

SNAPSHOTS = 3
"""Snapshots in memory: two whole ones and one being written."""
_REPLICAS = 4
"""Copies of another rank's snapshots: two whole ones, one being written to files, and one arriving."""

# [Note: a ring, unless one machine has most ranks]
#
# Arrange the ranks in a ring, machine by machine, the largest machine first. Each rank's holder is the rank
# that follows it at a distance of the largest machine's size. No machine is larger than that, so the holder
# is on another machine; and if the largest machine has at most half of all ranks, wrapping around does not
# lead back into it. Every rank then holds one copy, and equally large machines hold copies for each other as
# wholes: if two fail, state is lost only if they are neighbours.
#
# If one machine has more than half of the ranks, the other ranks take equal shares of its copies.


def replica_holders(hosts: Sequence[str]) -> dict[int, int | None]:
    """Each rank's holder, given each rank's host; None if there is only one host."""
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
    """The ranks whose copies this rank holds."""
    return tuple(sorted(owner for owner, holder in replica_holders(hosts).items() if holder == rank))


def copies_beside(hosts: Sequence[str], rank: int, *, replicate: bool) -> int:
    """The number of snapshots and copies that this rank's machine may hold at once, for all its ranks."""
    beside = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    held = sum(len(held_ranks(hosts, each)) for each in beside) if replicate else 0
    return SNAPSHOTS * len(beside) + _REPLICAS * held
