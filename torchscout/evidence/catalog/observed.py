"""A shape is executed several times and must do the same each time (paper, section 6.2).

What was seen is said; nothing is compressed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchscout.decision.wording import listed
from torchscout.evidence.catalog.profile import Profiler, Rows, ShapeProfile

__all__ = ["EXECUTIONS", "Observed", "known", "observe", "unknown"]

EXECUTIONS = 3
"""Times each shape is executed."""

_UNCOUNTED = "its paths cannot be counted here"


@dataclass(frozen=True, slots=True)
class Observed:
    """What is known of one shape: its profile, or why it has none that can be relied on."""

    rows: Rows
    profile: ShapeProfile | None
    """The one that every execution gave; None if it is unknown or unstable."""
    reason: str = ""
    """Why there is none; such a shape stands for itself."""

    def __post_init__(self) -> None:
        assert (self.profile is None) == bool(self.reason), "no profile without a reason, nor the reverse"


def observe(profiler: Profiler, rows: Rows) -> Observed:
    """Execute this shape until its profile is known or can no longer be."""
    first = profiler.profile(rows)
    for execution in range(2, EXECUTIONS + 1):
        if first is None:
            break
        again = profiler.profile(rows)
        if again is None:
            return Observed(rows, None, f"unstable: execution {execution} could not be counted")
        if again != first:
            return Observed(rows, None, f"unstable: {_difference(first, again, execution)}")
    if first is None:
        return Observed(rows, None, f"unknown: {getattr(profiler, 'reason', '') or _UNCOUNTED}")
    return Observed(rows, first)


def known(seen: Iterable[Observed]) -> dict[Rows, ShapeProfile]:
    """The shapes that may stand for others, or be stood for."""
    return {each.rows: each.profile for each in seen if each.profile is not None}


def unknown(seen: Iterable[Observed]) -> dict[Rows, str]:
    """The shapes that must all be retained, and why."""
    return {each.rows: each.reason for each in seen if each.profile is None}


def _difference(first: ShapeProfile, again: ShapeProfile, execution: int) -> str:
    if first.fingerprint != again.fingerprint:
        return f"execution {execution} ran as {again.fingerprint!r}, the first as {first.fingerprint!r}"
    before, after = dict(first.path_counts), dict(again.path_counts)
    changed = [
        f"{path} {before.get(path, 0)} times and then {after.get(path, 0)}"
        for path in sorted({*before, *after})
        if before.get(path, 0) != after.get(path, 0)
    ]
    return f"in execution {execution} other counts, {listed(changed)}"
