"""How many of the same cells are decided rightly with and without each piece. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torchscout.cli.campaign.ablation.outcome import Outcome
from torchscout.cli.campaign.ablation.pieces import EVERYTHING, PIECES, Piece
from torchscout.cli.campaign.result import Result
from torchscout.cli.campaign.table import printed
from torchscout.cli.campaign.tally import interval
from torchscout.cli.columns import wrapped

__all__ = ["HEADS", "ablations", "figures", "screen_of"]

HEADS = (
    "left out",
    "cells",
    "right with it",
    "right without",
    "95% interval",
    "wrong names",
    "false alarms",
    "missed",
)


def ablations(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One for each piece that some of the cells have to do with."""
    found = []
    for piece in PIECES:
        cells = [each for each in results if piece.key in each.ablated]
        if cells:
            found.append(_of(piece, cells))
    return found


def _of(piece: Piece, cells: Sequence[Result]) -> dict[str, Any]:
    without = Counter(each.ablated[piece.key] for each in cells)
    whole = Counter(each.ablated[EVERYTHING] for each in cells)
    low, high = interval(without[Outcome.RIGHT.value], len(cells))
    return {
        "piece": piece.key,
        "title": piece.title,
        "instead": piece.instead,
        "cells": len(cells),
        "right_with": whole[Outcome.RIGHT.value],
        "interval": [low, high],
        **{outcome.value: without[outcome.value] for outcome in Outcome},
    }


def figures(row: Mapping[str, Any]) -> list[str]:
    """One row of the table, as text."""
    low, high = row["interval"]
    return [
        row["title"],
        *(str(row[name]) for name in ("cells", "right_with", "right")),
        f"{100 * low:.1f} to {100 * high:.1f}",
        *(str(row[name]) for name in ("wrong", "false_alarm", "missed")),
    ]


def screen_of(report: Mapping[str, Any], folder: str) -> str:
    lines = [printed(HEADS, [*map(figures, report["ablations"])])]
    lines += [wrapped(f"{row['title']}: {row['instead']}", indent=2) for row in report["ablations"]]
    lines += [wrapped(f"FAILED  {each['cell']}: {each['reason']}") for each in report["failed"]]
    return "\n".join([*lines, wrapped(f"results    {folder}/results.jsonl")])
