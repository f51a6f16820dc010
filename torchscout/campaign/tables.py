"""A campaign's table in a terminal and as Markdown."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from torchscout.campaign.machine import caption
from torchscout.campaign.results import Result
from torchscout.utils.text import WIDEST, columns, wrapped

__all__ = ["HEADS", "Screen", "figures", "markdown", "printed", "screen_of"]

HEADS = (
    "fault",
    "ranks",
    "passed",
    "95% interval",
    "false positives",
    "wrong names",
    "missed",
    "fault to incident, median",
    "p95",
)
_NARROW = 130
"""A table has no borders in a terminal with fewer columns."""
_NOT_IF_NARROW = ("95% interval", "p95")
_GAP = 2

_Row = Mapping[str, Any]
"""A row of the table, as ``results.summarized`` makes it."""


class Screen:
    """A live table on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, cells: int) -> None:
        self._console, self._cells, self._done = console, cells, 0
        shown = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*shown, console=console)
        self._task = self._progress.add_task("starting", total=cells)
        self._live = Live(self._progress, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, result: Result, rows: Callable[[], Sequence[_Row]]) -> None:
        """Show one more result; ``rows`` gives the table so far, and is called only if it is drawn."""
        self._done += 1
        line = _line(result)
        if self._live is None:
            text = f"{self._done}/{self._cells} {line}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        if not result.grade.passed:
            self._console.print(line, markup=False, highlight=False)
        self._progress.update(self._task, completed=self._done, description=_name(result))
        table = tabulated(HEADS, [*map(figures, rows())], self._console.width)
        self._live.update(Group(table, self._progress))


def screen_of(rows: Sequence[_Row], results: Iterable[Result], folder: str) -> str:
    """The final table, and the cells that failed."""
    notes = [f"reduced    {row['title']}: {each}" for row in rows for each in row["reduced"]]
    notes += [_line(each) for each in results if not each.grade.passed]
    notes.append(f"results    {folder}/results.jsonl")
    return "\n".join([printed(HEADS, [*map(figures, rows)]), *map(wrapped, notes)])


def printed(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, as wide as the terminal."""
    text, width = io.StringIO(), columns() or WIDEST
    Console(width=width, file=text).print(tabulated(heads, rows, width))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def tabulated(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """A table that breaks no word. A narrow one has no borders, and leaves out two columns."""
    if width >= _NARROW:
        table = Table()
        for place, head in enumerate(heads):
            table.add_column(head, justify="left" if place == 0 else "right", no_wrap=place == 0)
    else:
        kept = [place for place, head in enumerate(heads) if head not in _NOT_IF_NARROW]
        heads, rows = [heads[place] for place in kept], [[row[place] for place in kept] for row in rows]
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        widths = [max(map(len, [*head.split(), *cells])) for head, *cells in zip(heads, *rows, strict=True)]
        room = width - sum(widths[1:]) - _GAP * (len(widths) - 1)
        table.add_column(heads[0], max_width=room)
        for head, needed in zip(heads[1:], widths[1:], strict=True):
            table.add_column(head, justify="right", width=needed)
    for row in rows:
        table.add_row(*row)
    return table


def figures(row: _Row) -> list[str]:
    """The texts of one row, in the order of ``HEADS``. A row without faults has nothing to miss."""
    is_clean = row["row"].endswith("clean")
    rest = "" if row["run"] == row["cells"] else f" (of {row['cells']})"
    return [
        row["title"],
        ", ".join(map(str, row["ranks"])),
        f"{row['passed']}/{row['run']}{rest}",
        " to ".join(f"{100 * each:.1f}" for each in row["interval"] or ()),
        str(row["false_alarms"]),
        *("" if is_clean else str(row[name]) for name in ("wrong_names", "missed")),
        *("" if row[name] is None else f"{row[name]:.2f} s" for name in ("seconds_median", "seconds_p95")),
    ]


def _line(result: Result) -> str:
    name = _name(result)
    detail = (
        "" if result.found or not result.detail else f": {result.detail}"
    )  # figures of work without ranks
    return f"passed  {name}{detail}" if result.grade.passed else f"FAILED  {name}: {result.grade.reason}"


def _name(result: Result) -> str:
    return result.cell.rpartition("@")[0]


def markdown(report: Mapping[str, Any]) -> str:
    """Caption, table, and what was reduced, skipped or failed; ``report`` as `scout campaign` writes it."""
    lines = [caption(report) + ":", "", _markdown_line(HEADS), "|---" * len(HEADS) + "|"]
    for row in report["rows"]:
        title, ranks, passed, *rest = figures(row)
        if not row["passed"] == row["run"] == row["cells"]:
            passed = f"**{passed}**"
        lines.append(_markdown_line([title, ranks, passed, *rest]))
    notes = [f"- {row['title']}: {', '.join(row['reduced'])}." for row in report["rows"] if row["reduced"]]
    skipped = Counter((each["row"], each["reason"]) for each in report["skipped"])
    notes += [f"- Skipped, {count} of `{row}`: {reason}." for (row, reason), count in skipped.items()]
    notes += [
        f"- Failed: `{each['cell'].rpartition('@')[0]}`: {each['reason']}." for each in report["failed"]
    ]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _markdown_line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
