"""The facts that a catalog is bound to, and what has drifted from them (paper, section 6.2).

The facts are a profiler's; here they are only held and compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Drift", "drift", "drift_in_words"]


@dataclass(frozen=True, slots=True)
class Drift:
    """One fact that is not what it was."""

    fact: str
    then: str | None
    """When the shapes were executed; None if nobody asked."""
    now: str | None

    def __str__(self) -> str:
        return f"{self.fact} was {_told(self.then)} and is {_told(self.now)}"


def drift(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[Drift, ...]:
    """Every fact that differs, or that only one side knows, by name."""
    names = sorted({*then, *now})
    differing = (name for name in names if then.get(name) != now.get(name))
    return tuple(Drift(name, then.get(name), now.get(name)) for name in differing)


def drift_in_words(drifted: tuple[Drift, ...]) -> str:
    """All of them: whoever has to put one right wants to know of the others."""
    return "; ".join(map(str, drifted))


def _told(value: str | None) -> str:
    return "not recorded" if value is None else repr(value)
