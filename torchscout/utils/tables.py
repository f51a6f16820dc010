"""Lays out tables and sentences for a terminal. Texts of records are shown as they are, control characters
as escapes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchscout.utils.text import columns, visible, wrapped

__all__ = ["stacked", "table"]

_UNBOUNDED = 100_000
_STYLES = {"verified": "green", "latest, verified": "green", "damaged": "red"}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without lines; a cell that is too wide continues below."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        made.add_column(head, overflow="fold", justify="right" if head == "size" else "left")
    for row in rows:
        made.add_row(*(Text(visible(cell), style=_STYLES.get(cell, "")) for cell in row))
    return made


def stacked(parts: Iterable[Table | str], width: int | None = None) -> str:
    """Return the parts below each other, as wide as ``width`` or the terminal; without both, as needed.

    Without ``width``, lines break between words only, so that a path can be copied.
    """
    console = Console(width=width or columns() or _UNBOUNDED, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for part in parts:
            if isinstance(part, Table):
                console.print(part)
            else:
                console.out(_wrapped(visible(part), width), highlight=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _wrapped(line: str, width: int | None) -> str:
    first = " " * (len(line) - len(line.lstrip()))
    if width is None:
        return wrapped(line, len(first) or 2)
    return textwrap.fill(line.lstrip(), width, initial_indent=first, subsequent_indent=first + "  ")
