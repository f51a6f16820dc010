"""What expert-parallel ranks might send each other: plans for an AllToAll (paper, section 6.2).

Pure. A plan is a square matrix of row counts, who sends how many to whom by place in the group. The same plan
is carried out by corresponding groups, so that uneven traffic alone sets nobody apart.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["CAPTURED", "PLANS", "Plan"]

Plan = tuple[tuple[int, ...], ...]
"""Row ``i`` is what the member at place ``i`` sends to each."""

CAPTURED = "captured"
"""As training did it last, on the source's replica."""


def _balanced(members: int, rows: int) -> Plan:
    """Everybody sends as much to everybody."""
    return tuple((max(1, rows // members),) * members for _ in range(members))


def _shifted(members: int, rows: int) -> Plan:
    """A permutation: all that a member has goes to the next one."""
    return tuple(
        tuple(rows if receiver == (sender + 1) % members else 0 for receiver in range(members))
        for sender in range(members)
    )


def _reversed(members: int, rows: int) -> Plan:
    """Another one: the first sends to the last, and the last to the first."""
    return tuple(
        tuple(rows if receiver == members - 1 - sender else 0 for receiver in range(members))
        for sender in range(members)
    )


def _skewed(members: int, rows: int) -> Plan:
    """One expert is popular: each next place gets half as much, and everybody something."""
    shares = [1 << (members - 1 - min(place, 30)) if members <= 31 else 1 for place in range(members)]
    row = tuple(max(1, rows * share // sum(shares)) for share in shares)
    return (row,) * members


def _sparse(members: int, rows: int) -> Plan:
    """Nobody routes anything to every second place."""
    used = (members + 1) // 2
    row = tuple(max(1, rows // used) if receiver % 2 == 0 else 0 for receiver in range(members))
    return (row,) * members


PLANS: dict[str, Callable[[int, int], Plan]] = {
    "balanced": _balanced,
    "shifted": _shifted,
    "reversed": _reversed,
    "skewed": _skewed,
    "sparse": _sparse,
}
"""By name: from the number of members and the rows that one of them has to what is sent."""
