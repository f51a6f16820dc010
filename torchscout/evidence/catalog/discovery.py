"""Executes every admitted shape before training and keeps what was seen (paper, section 6.2, discovery)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torchscout.evidence.catalog.journal import Journal
from torchscout.evidence.catalog.observed import Observed, observe
from torchscout.evidence.catalog.profile import Profiler, Rows

__all__ = ["Executions", "discover"]


class Executions:
    """What each shape did, which is executed when it is first asked for."""

    def __init__(self, profiler: Profiler, resume_from: Path | None = None) -> None:
        """With ``resume_from`` each shape is written to that journal as soon as it is known.

        Those that are there already are not executed again; a ``CatalogError`` if it has other facts.
        """
        self._profiler = profiler
        self._journal = None if resume_from is None else Journal(resume_from, profiler.facts())
        self._seen: dict[Rows, Observed] = {} if self._journal is None else dict(self._journal.seen)

    def of(self, rows: Rows) -> Observed:
        if rows not in self._seen:
            self._seen[rows] = observe(self._profiler, rows)
            if self._journal is not None:
                self._journal.add(self._seen[rows])
        return self._seen[rows]


def discover(
    profiler: Profiler,
    shapes: Iterable[Rows],
    *,
    on_progress: Callable[[Observed], None] = lambda _: None,
    resume_from: Path | None = None,
) -> tuple[Observed, ...]:
    """What each shape does, in the order of ``shapes``; see ``Executions`` for ``resume_from``."""
    executions = Executions(profiler, resume_from)
    found: list[Observed] = []
    for rows in dict.fromkeys(shapes):
        found.append(executions.of(rows))
        on_progress(found[-1])
    return tuple(found)
