"""How wide a screen is, and sentences that are wrapped to it between words."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

__all__ = ["WIDEST", "columns", "wrapped"]

WIDEST = 150
"""Of tables where there is no terminal."""


def columns() -> int | None:
    """Of the terminal that standard output goes to, or as COLUMNS says; None where neither is."""
    told = os.environ.get("COLUMNS", "")
    if sys.stdout.isatty() or (told.isdigit() and int(told)):
        return shutil.get_terminal_size().columns
    return None


def wrapped(line: str, indent: int = 11) -> str:
    """The line as it is, or on several lines if it is wider than the screen; long words stay whole."""
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
