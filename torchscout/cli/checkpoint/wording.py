"""Sizes and ranks in words, and tables and sentences that fit the terminal, if there is one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchscout.utils.text import columns, listed, wrapped

__all__ = ["counted", "numbers_in_words", "ranks_in_words", "size_in_words", "stacked", "table"]

_UNBOUNDED = 100_000


def size_in_words(count: float) -> str:
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.0f} bytes" if units[0] == "bytes" else f"{count:.1f} {units[0]}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def numbers_in_words(numbers: Sequence[int]) -> str:
    """``0-3, 5 and 7``: however many ranks there are."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    words: list[str] = []
    for first, last in ((span[0], span[-1]) for span in spans):
        words += [f"{first}-{last}"] if last - first > 1 else map(str, range(first, last + 1))
    return listed(words, most=len(words))


def ranks_in_words(ranks: Sequence[int], world_size: int = 0) -> str:
    """``rank 3``, ``ranks 0-3 and 5``, or ``any rank`` for all of ``world_size``."""
    if len(ranks) == world_size > 1:
        return "any rank"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers_in_words(ranks)}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        made.add_column(head, overflow="fold", justify="right" if head == "size" else "left")
    for row in rows:
        made.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return made


_STYLES = {"verified": "green", "latest, verified": "green", "damaged": "red"}


def stacked(parts: Sequence[Table | str]) -> str:
    """One part below the other, as wide as the terminal; without one, as wide as needed.

    Lines break between words only, so that a path can be copied.
    """
    console = Console(width=columns() or _UNBOUNDED, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for part in parts:
            if isinstance(part, Table):
                console.print(part)
            else:
                indent = len(part) - len(part.lstrip())
                console.out(wrapped(part, indent or 2), highlight=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
