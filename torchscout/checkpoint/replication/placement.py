"""Assigns each rank a holder of its copies, on another machine if there is one (paper, section 8).

A pure function of the list of hosts, so that all ranks compute the same assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

__all__ = ["SNAPSHOTS", "copies_beside", "held_ranks", "replica_holders"]

SNAPSHOTS = 3
"""Snapshots in memory: two whole ones and one being written."""
_REPLICAS = 4
"""Copies of another rank's snapshots: two whole ones, one being written to files, and one arriving."""

# [Note: pairs of machines]
#
# Machines of equal size hold copies for each other in pairs. State is lost only if both machines of a pair
# fail: that is N / 2 of all pairs of N machines, where a ring, in which each machine holds for the next one,
# has N. A single failure costs the same in both, and every machine sends and receives one copy per rank.
# Larger groups with one copy per rank are rings again and have as many fatal pairs as machines: the group of
# three that an odd number of machines needs has three.
#
# Machines that have no partner of equal size form one more group. If one of them has more than half of the
# group's ranks, the largest pairs join, so that no rank has to hold two copies as long as that is possible.
# Within a group, arrange the ranks machine by machine, the largest machine first. Each rank's holder is the
# rank that follows it at a distance of the largest machine's size. No machine is larger than that, so the
# holder is on another machine; and if the largest machine has at most half of the ranks, wrapping around does
# not lead back into it. If it has more, the other ranks take equal shares of its copies.

_Machine = list[int]
"""The ranks of one machine."""


def replica_holders(hosts: Sequence[str]) -> dict[int, int | None]:
    """Each rank's holder, given each rank's host; None if there is only one host."""
    machines: dict[str, _Machine] = {}
    for rank, host in enumerate(hosts):
        machines.setdefault(host, []).append(rank)
    if len(machines) < 2:
        return dict.fromkeys(range(len(hosts)), None)
    found: dict[int, int | None] = {}
    for group in _groups(sorted(machines.values(), key=len, reverse=True)):  # stable: equals by first rank
        found |= _holders_within(group)
    return found


def _groups(machines: list[_Machine]) -> list[list[_Machine]]:
    """Machines, the largest first, in groups that hold copies for each other: see the note above."""
    pairs, single = [], []
    for _, equals in groupby(machines, key=len):
        same = list(equals)
        pairs += [same[place : place + 2] for place in range(0, len(same) - 1, 2)]
        single += same[len(same) - len(same) % 2 :]
    while pairs and single and 2 * max(map(len, single)) > sum(map(len, single)):
        single += pairs.pop(0)
    single.sort(key=len, reverse=True)
    return [*pairs, single] if single else pairs


def _holders_within(group: list[_Machine]) -> dict[int, int]:
    largest, *others = group
    rest = [rank for machine in others for rank in machine]
    row, shift = largest + rest, len(largest)
    if shift <= len(rest):
        return {rank: row[(place + shift) % len(row)] for place, rank in enumerate(row)}
    found = {rank: rest[place % len(rest)] for place, rank in enumerate(largest)}
    return found | dict(zip(rest, largest, strict=False))


def held_ranks(hosts: Sequence[str], rank: int) -> tuple[int, ...]:
    """The ranks whose copies this rank holds."""
    return tuple(sorted(owner for owner, holder in replica_holders(hosts).items() if holder == rank))


def copies_beside(hosts: Sequence[str], rank: int, *, replicate: bool) -> int:
    """The number of snapshots and copies that this rank's machine may hold at once, for all its ranks."""
    beside = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    held = sum(len(held_ranks(hosts, each)) for each in beside) if replicate else 0
    return SNAPSHOTS * len(beside) + _REPLICAS * held
