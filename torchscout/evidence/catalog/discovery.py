"""Executes every admitted shape before training and keeps what was seen (paper, section 6.2, discovery)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torchscout.evidence.catalog.journal import Journal
from torchscout.evidence.catalog.observed import Observed, observe
from torchscout.evidence.catalog.profile import Profiler, Rows

__all__ = ["Observer", "discover", "observer_of"]

Observer = Callable[[Rows], Observed]
"""Says of a shape what it does, from the journal if it was executed before."""


def observer_of(profiler: Profiler, resume_from: Path | None = None) -> Observer:
    """With ``resume_from`` each shape is written to that journal as soon as it is known.

    Those that are there already are not executed again; a ``CatalogError`` if it has other facts.
    """
    journal = None if resume_from is None else Journal(resume_from, profiler.facts())
    seen: dict[Rows, Observed] = {} if journal is None else dict(journal.seen)

    def observed(rows: Rows) -> Observed:
        if rows not in seen:
            seen[rows] = observe(profiler, rows)
            if journal is not None:
                journal.add(seen[rows])
        return seen[rows]

    return observed


def discover(
    profiler: Profiler,
    shapes: Iterable[Rows],
    *,
    on_progress: Callable[[Observed], None] = lambda _: None,
    resume_from: Path | None = None,
) -> tuple[Observed, ...]:
    """What each shape does, in the order of ``shapes``; see ``observer_of`` for ``resume_from``."""
    observed = observer_of(profiler, resume_from)
    found: list[Observed] = []
    for rows in dict.fromkeys(shapes):
        found.append(observed(rows))
        on_progress(found[-1])
    return tuple(found)
