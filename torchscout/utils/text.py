"""Formats ranks, lists and sentences, and wraps lines to the width of the terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

__all__ = [
    "WIDEST",
    "columns",
    "counted",
    "listed",
    "named",
    "numbers_in_words",
    "ranks_in_words",
    "sentences",
    "size_in_words",
    "spans",
    "visible",
    "wrapped",
]


def listed(items: Iterable[object], *, most: int = 4) -> str:
    """Return ``a, b and c``, or ``a, b and 5 more``."""
    names = [str(item) for item in items]
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def named(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Return ``rank 5``, ``ranks 1, 3 and 5``, or ``rank 5 on node-1``."""
    names = f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks, most=8)}"
    return f"{names} on {listed(hosts)}" if hosts else names


def size_in_words(count: float) -> str:
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.0f} bytes" if units[0] == "bytes" else f"{count:.1f} {units[0]}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def spans(ranks: Iterable[int]) -> list[list[int]]:
    """Return ranks as ascending pairs of first and last: ``[[0, 3], [7, 7]]``."""
    found: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def numbers_in_words(numbers: Sequence[int]) -> str:
    """``0-3, 5 and 7``: however many ranks there are."""
    words: list[str] = []
    for first, last in spans(numbers):
        words += [f"{first}-{last}"] if last - first > 1 else map(str, range(first, last + 1))
    return listed(words, most=len(words))


def ranks_in_words(ranks: Sequence[int], world_size: int = 0) -> str:
    """``rank 3``, ``ranks 0-3 and 5``, or ``any rank`` for all of ``world_size``."""
    if len(ranks) == world_size > 1:
        return "any rank"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers_in_words(ranks)}"


def sentences(*parts: str) -> str:
    """Give each part a capital and a period: ``Rank 5 is late. 7 ranks wait.`` Empty parts are left out."""
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts if part)


_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return the text with escapes instead of characters that would move a terminal's cursor, or reorder
    what it shows."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


WIDEST = 150
"""The width of tables without a terminal."""


def columns() -> int | None:
    """Return the width of the terminal, or COLUMNS if it is set; None if standard output is no terminal."""
    setting = os.environ.get("COLUMNS", "")
    if sys.stdout.isatty() or (setting.isdigit() and int(setting)):
        return shutil.get_terminal_size().columns
    return None


def wrapped(line: str, indent: int = 11) -> str:
    """Wrap the line if it is wider than the terminal; long words stay whole."""
    width = columns()
    if width is None or len(line) <= width:
        return line
    first = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line.lstrip(),
        width,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
