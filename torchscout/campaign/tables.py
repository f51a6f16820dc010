"""Results as a table in a terminal and as Markdown."""

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
from torchscout.campaign.results import Result, RowSummary, percentile
from torchscout.utils.text import WIDEST, columns, wrapped

__all__ = ["Screen", "markdown", "printed", "screen_of"]

HEADS = (
    "fault",
    "ranks",
    "passed",
    "95% interval",
    "false positives",
    "wrong names",
    "missed",
    "to incident, median",
    "p95",
)
_NARROW = 130
"""Columns of a terminal below which a table has no borders."""
_NOT_IF_NARROW = ("95% interval", "p95")
_GAP = 2


class Screen:
    """A live table on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, cells: int) -> None:
        self._console, self._cells, self._done = console, cells, 0
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("starting", total=cells)
        self._live = Live(self._progress, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, result: Result, summaries: Callable[[], Sequence[RowSummary]]) -> None:
        """``summaries`` are those of all rows by now, should they be needed."""
        self._done += 1
        line = _line(result)
        if self._live is None:
            text = f"{self._done}/{self._cells} {line}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        if not result.grade.passed:
            self._console.print(line, markup=False, highlight=False)
        self._progress.update(self._task, completed=self._done, description=_name(result))
        table = tabulated(HEADS, [*map(row_figures, summaries())], self._console.width)
        self._live.update(Group(table, self._progress))


def screen_of(summaries: Sequence[RowSummary], results: Iterable[Result], folder: str) -> str:
    """The final table, and what failed."""
    notes = [f"reduced    {each.row.title}: {what}" for each in summaries for what in each.reduced]
    notes += [_line(each) for each in results if not each.grade.passed]
    notes.append(f"results    {folder}/results.jsonl")
    return "\n".join([printed(HEADS, [*map(row_figures, summaries)]), *map(wrapped, notes)])


def printed(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, as wide as the terminal."""
    text, width = io.StringIO(), columns() or WIDEST
    Console(width=width, file=text).print(tabulated(heads, rows, width))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def tabulated(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """No word is broken. A narrow table has no borders, and not all columns of documents and pages."""
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


def row_figures(summary: RowSummary) -> list[str]:
    """One row of the table, as text."""
    ranks = ", ".join(map(str, summary.ranks))
    low, high = summary.interval
    shown = f"{100 * low:.1f} to {100 * high:.1f}" if summary.run else ""
    rest = "" if summary.run == summary.cells else f" (of {summary.cells})"
    return [
        summary.row.title,
        ranks,
        f"{summary.passed}/{summary.run}{rest}",
        shown,
        str(summary.false_alarms),
        str(summary.wrong_names),
        str(summary.missed),
        _seconds(percentile(summary.seconds, 0.5)),
        _seconds(percentile(summary.seconds, 0.95)),
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _line(result: Result) -> str:
    name = _name(result)
    told = "" if result.found or not result.detail else f": {result.detail}"  # figures of work without ranks
    return f"passed  {name}{told}" if result.grade.passed else f"FAILED  {name}: {result.grade.reason}"


def _name(result: Result) -> str:
    return result.cell.rpartition("@")[0]


_MARKDOWN_HEADS = (
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


def markdown(report: Mapping[str, Any]) -> str:
    """Caption, table, and what was reduced, skipped or failed; ``report`` as `scout campaign` writes it."""
    lines = [caption(report) + ":", "", _markdown_line(_MARKDOWN_HEADS), "|---" * len(_MARKDOWN_HEADS) + "|"]
    lines += [_markdown_line(_figures(row)) for row in report["rows"]]
    notes = [f"- {row['title']}: {', '.join(row['reduced'])}." for row in report["rows"] if row["reduced"]]
    notes += [f"- {each}." for each in _skipped(report)]
    notes += [
        f"- Failed: `{each['cell'].rpartition('@')[0]}`: {each['reason']}." for each in report["failed"]
    ]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _figures(row: Mapping[str, Any]) -> list[str]:
    is_clean = row["row"].endswith("clean")
    all_passed = row["passed"] == row["run"] == row["cells"]
    passed = f"{row['passed']}/{row['run']}" + ("" if row["run"] == row["cells"] else f" (of {row['cells']})")
    return [
        row["title"],
        ", ".join(map(str, row["ranks"])),
        passed if all_passed else f"**{passed}**",
        " to ".join(f"{100 * each:.1f}" for each in row["interval"] or ()),
        str(row["false_alarms"]),
        "" if is_clean else str(row["wrong_names"]),
        "" if is_clean else str(row["missed"]),
        *("" if row[name] is None else f"{row[name]:.2f} s" for name in ("seconds_median", "seconds_p95")),
    ]


def _skipped(report: Mapping[str, Any]) -> list[str]:
    """By row and reason: a row may have hundreds of cells."""
    counted = Counter((each["row"], each["reason"]) for each in report["skipped"])
    return [f"Skipped, {count} of `{row}`: {reason}" for (row, reason), count in counted.items()]


def _markdown_line(texts: Any) -> str:
    return "| " + " | ".join(texts) + " |"
