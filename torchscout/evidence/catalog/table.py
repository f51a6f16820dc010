"""The representatives of one projection's shapes (paper, section 6.2).

A table says what was admitted, what stands for it and what could not be compressed; ``catalog`` says where in
the model it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchscout.evidence.catalog.cover import by_size, check_cover, minimum_cover
from torchscout.evidence.catalog.observed import Observed, known, unknown
from torchscout.evidence.catalog.profile import Rows, ShapeProfile

__all__ = ["Representative", "Retained", "Table", "tabulated"]


@dataclass(frozen=True, slots=True)
class Representative:
    """A shape that stands for all those it covers."""

    rows: Rows
    profile: ShapeProfile


@dataclass(frozen=True, slots=True)
class Retained:
    """A shape that stands only for itself, because nothing reliable is known of what it does."""

    rows: Rows
    reason: str


@dataclass(frozen=True, slots=True)
class Table:
    """All admitted shapes of one projection, compressed."""

    name: str
    """Of the projection, such as ``6144x10752``."""
    facts: Mapping[str, str]
    """What the profiler said of device, software, kernel and dimensions."""
    domain: str
    """The admitted shapes in words."""
    admitted: int
    """How many they are."""
    selected: tuple[Representative, ...]
    """The minimum cover of those whose profile is known."""
    retained: tuple[Retained, ...]
    """All the others."""
    occurrences: int
    """Executions of any path by any shape whose profile is known."""
    covered: int
    """Those of them that a representative repeats."""

    @property
    def representatives(self) -> tuple[Rows, ...]:
        """Every shape that has to be replayed, smallest first."""
        shapes = [each.rows for each in self.selected] + [each.rows for each in self.retained]
        return tuple(sorted(shapes, key=by_size))


def tabulated(name: str, facts: Mapping[str, str], domain: str, seen: Iterable[Observed]) -> Table:
    """Compress what was seen; whether the result covers it is checked, not believed."""
    seen = list(seen)
    profiles, reasons = known(seen), unknown(seen)
    assert len(profiles) + len(reasons) == len(seen), "a shape was observed twice"
    chosen = minimum_cover(profiles)
    check = check_cover(profiles, chosen)
    assert check.complete, f"not covered: {check.uncovered}"
    assert not check.redundant, f"covered by others: {check.redundant}"
    return Table(
        name=name,
        facts=dict(facts),
        domain=domain,
        admitted=len(seen),
        selected=tuple(Representative(rows, profiles[rows]) for rows in chosen),
        retained=tuple(Retained(rows, reasons[rows]) for rows in sorted(reasons, key=by_size)),
        occurrences=check.occurrences,
        covered=check.covered,
    )
