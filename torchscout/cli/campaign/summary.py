"""What a campaign has shown, row by row. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchscout.cli.campaign.cell import Cell, Row
from torchscout.cli.campaign.grading import Flaw
from torchscout.cli.campaign.layout import LAYOUTS
from torchscout.cli.campaign.result import Result
from torchscout.cli.campaign.tally import interval, percentile

__all__ = ["RowSummary", "as_report", "summarized"]


@dataclass(frozen=True, slots=True)
class RowSummary:
    row: Row
    cells: int
    """That were asked for."""
    run: int
    passed: int
    ranks: tuple[int, ...]
    """How many each of its jobs has."""
    reduced: tuple[str, ...]
    """Which jobs have fewer ranks here than in the campaign, as ``HSDP 2x2 on 4 ranks for HSDP 4x4 on 16``,
    and in how many cells less is to be named therefore."""
    false_alarms: int
    """Cells in which more was reported than was wrong."""
    wrong_names: int
    """Cells in which something else was."""
    missed: int
    """Cells in which nothing was, though something was wrong."""
    seconds: Sequence[float]
    """From fault to incident, of each cell that has both."""

    @property
    def interval(self) -> tuple[float, float]:
        """Of the share that passes, 95 %."""
        return interval(self.passed, self.run)

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "row": self.row.key,
            "title": self.row.title,
            "trigger": self.row.trigger,
            "ranks": list(self.ranks),
            "reduced": list(self.reduced),
            "cells": self.cells,
            "run": self.run,
            "passed": self.passed,
            "interval": [low, high] if self.run else None,
            "false_alarms": self.false_alarms,
            "wrong_names": self.wrong_names,
            "missed": self.missed,
            "seconds_median": percentile(self.seconds, 0.5),
            "seconds_p95": percentile(self.seconds, 0.95),
        }


def summarized(rows: Iterable[Row], cells: Sequence[Cell], results: Mapping[str, Result]) -> list[RowSummary]:
    """One for each row of which cells are wanted."""
    found = []
    for row in rows:
        wanted = [cell for cell in cells if cell.row == row.key]
        if wanted:
            found.append(
                _summary(row, wanted, [results[each.identity] for each in wanted if each.identity in results])
            )
    return found


def as_report(
    campaign: str, seed: int, summaries: Sequence[RowSummary], results: Sequence[Result]
) -> dict[str, Any]:
    """One document: the table, each cell that failed, and whether all have passed."""
    return {
        "campaign": campaign,
        "seed": seed,
        "passed": all(each.grade.passed for each in results),
        "complete": all(each.run == each.cells for each in summaries),
        "took_seconds": sum(each.took_seconds for each in results),
        "rows": [each.to_json() for each in summaries],
        "failed": [each.to_json() for each in results if not each.grade.passed],
    }


def _reduced(cell: Cell) -> str:
    """Nothing where its ranks are as many as planned."""
    planned, here = LAYOUTS[cell.layout], cell.place
    if planned.ranks == here.ranks:
        return ""
    return f"{here.title} on {here.ranks} ranks for {planned.title} on {planned.ranks}"


def _coarser(cells: Sequence[Cell]) -> list[str]:
    counted = Counter(cell.coarser for cell in cells if cell.coarser)
    return [
        f"in {count} of {len(cells)} cells the right answer is a {what}" for what, count in counted.items()
    ]


def _summary(row: Row, cells: Sequence[Cell], results: Sequence[Result]) -> RowSummary:
    flaws = [each.grade.flaw for each in results]
    return RowSummary(
        row,
        len(cells),
        len(results),
        sum(each.grade.passed for each in results),
        tuple(sorted({cell.place.ranks for cell in cells})),
        (*dict.fromkeys(filter(None, map(_reduced, cells))), *_coarser(cells)),
        flaws.count(Flaw.FALSE_ALARM),
        flaws.count(Flaw.WRONG_NAME),
        flaws.count(Flaw.MISSED),
        [each.seconds for each in results if each.seconds is not None],
    )
