"""Which shapes of experts checks go over, and what that lacks (paper, sections 6.2 and 8)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_CATALOG", "Coverage"]

NO_CATALOG = (
    "experts are replayed only with as many rows as training happens to route to them; scout discover "
    "makes a catalog of shapes, for ReplayConfig(catalog=...)"
)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What accepted checks say about a mixture of experts."""

    recipes: int | None = None
    """Checks in a row that go over all shapes of the catalog, on every rank; None without one."""
    lacking: str | None = None
    """What they do not go over, and why."""
