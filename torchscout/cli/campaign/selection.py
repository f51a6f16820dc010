"""Which cells of a campaign are run: a pattern, or a sample of every row. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torchscout.cli.campaign.cell import Cell, Row

__all__ = ["chosen", "sampled"]

_QUICK_LAYOUTS = ("ddp", "hsdp")
"""A quick run has 16 ranks in one of these only, where a row has the choice: starting them takes longest."""


def chosen(cells: Sequence[Cell], rows: Sequence[Row], pattern: str) -> list[Cell]:
    """Those whose identity, or the beginning of it, matches; a ``ValueError`` where none does."""
    matching = [cell for cell in cells if _matches(cell, pattern)]
    if matching:
        return matching
    known = ", ".join(row.key for row in rows)
    raise ValueError(
        f"no cell matches {pattern!r}; a pattern is ROW, ROW/LAYOUT or ROW/LAYOUT/NAME with * for anything, "
        f"and the rows are {known}"
    )


def sampled(cells: Sequence[Cell], seed: int, counts: Mapping[str, int]) -> list[Cell]:
    """As many of every row as ``counts`` says, or one, the same for the same seed."""
    choose = random.Random(seed)
    layout = choose.choice(_QUICK_LAYOUTS)
    found: list[Cell] = []
    for row in dict.fromkeys(cell.row for cell in cells):
        every = [cell for cell in cells if cell.row == row]
        candidates = [cell for cell in every if cell.layout == layout] or every
        wanted = set(choose.sample(range(len(candidates)), min(counts.get(row, 1), len(candidates))))
        found += [cell for place, cell in enumerate(candidates) if place in wanted]
    return found


def _matches(cell: Cell, pattern: str) -> bool:
    identity = cell.identity
    return any(fnmatchcase(identity, each) for each in (pattern, f"{pattern}@*", f"{pattern}/*"))
