"""Executes every admitted shape before training and keeps what was seen (paper, section 6.2, discovery)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torchscout.evidence.catalog.journal import Journal
from torchscout.evidence.catalog.observed import Observed, observe
from torchscout.evidence.catalog.profile import Profiler, Rows

__all__ = ["discover"]


def discover(
    profiler: Profiler,
    shapes: Iterable[Rows],
    *,
    on_progress: Callable[[Observed], None] = lambda _: None,
    resume_from: Path | None = None,
) -> tuple[Observed, ...]:
    """What each shape does, in the order of ``shapes``.

    With ``resume_from`` each shape is written to that journal as soon as it is known, and those that are
    there already are not executed again; a ``CatalogError`` if it was written under other facts.
    """
    journal = None if resume_from is None else Journal(resume_from, profiler.facts())
    found: dict[Rows, Observed] = {}
    for rows in shapes:
        if rows in found:
            continue
        if journal is not None and rows in journal.seen:
            seen = journal.seen[rows]
        else:
            seen = observe(profiler, rows)
            if journal is not None:
                journal.add(seen)
        found[rows] = seen
        on_progress(seen)
    return tuple(found.values())
