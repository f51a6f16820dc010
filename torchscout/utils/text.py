"""Ranks and names in words, cut short where a list would become too long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["listed", "named"]


def listed(items: Iterable[object], *, most: int = 4) -> str:
    """``a, b and c``, or ``a, b and 5 more``."""
    names = [str(item) for item in items]
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def named(ranks: Sequence[int]) -> str:
    """``rank 5``, or ``ranks 1, 3 and 5``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks, most=8)}"
