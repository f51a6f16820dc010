"""A discovery as a person sees it: progress while it runs, a table at its end."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from torchscout.cli.checkpoint.wording import counted, stacked, table
from torchscout.experts.catalog import Catalog
from torchscout.experts.coverage import Observed, Table

__all__ = ["Screen", "screen_of"]

_LINES = 10
"""Of progress for each kernel, where there is no terminal."""


_MOST = 5
"""Retained shapes that are named as they come, for each kernel; the table counts them all."""


class Screen:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console) if console.is_terminal else None
        self._task: TaskID | None = None
        self._what, self._shapes, self._done, self._retained = "", 0, 0, 0

    def __enter__(self) -> Screen:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, what: str, shapes: int) -> None:
        self._what, self._shapes, self._done, self._retained = what, shapes, 0, 0
        if self._progress is not None:
            self._task = self._progress.add_task(what, total=shapes)

    def show(self, seen: Observed) -> None:
        self._done += 1
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done)
        elif self._done == self._shapes or self._done % max(1, self._shapes // _LINES) == 0:
            self._say(f"{self._what}: {self._done} of {self._shapes} shapes")
        if seen.profile is None and self._retained < _MOST:
            self._retained += 1
            self._say(f"{self._what}: rows {_rows(seen.rows)} retained, {seen.reason:.200}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def screen_of(catalog: Catalog) -> str:
    """What was admitted, what stands for it, and what could not be compressed."""
    heads = ["projection", "shapes", "admitted", "selected", "reduction", "occurrences covered", "retained"]
    parts = [table(heads, [_figures(each) for each in catalog.tables])]
    reasons = [_because(each) for each in catalog.tables if each.retained]
    gaps = [f"Not covered: {gap}. Only uniform shapes are." for gap in catalog.gaps]
    return stacked([*parts, *reasons, *gaps])


def _figures(each: Table) -> list[str]:
    replayed = len(each.selected) + len(each.retained)
    return [
        each.name,
        each.domain,
        _number(each.admitted),
        str(len(each.selected)),
        f"{100 * (1 - replayed / each.admitted):.2f}%",
        f"{each.covered:,} of {each.occurrences:,}",
        str(len(each.retained)),
    ]


def _because(each: Table) -> str:
    kinds = Counter(retained.reason.partition(":")[0] for retained in each.retained)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    first = each.retained[0]
    shapes = counted(len(each.retained), "shape")
    return f"{each.name}: {shapes} retained ({told}), such as rows {_rows(first.rows)}, {first.reason:.300}"


def _rows(rows: tuple[int, ...]) -> str:
    return f"{rows[0]}" if len(set(rows)) == 1 else str(rows)


def _number(value: int) -> str:
    return f"{value:,}" if value < 10**9 else f"{value:.2e}"
