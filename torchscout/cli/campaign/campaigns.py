"""The two campaigns: their rows, their cells, and how those are run and shown."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchscout.cli.campaign.ablation import summary as of_ablation
from torchscout.cli.campaign.ablation.bench import run_ablated
from torchscout.cli.campaign.ablation.cells import ablation_cells
from torchscout.cli.campaign.ablation.pieces import ROWS as ABLATION_ROWS
from torchscout.cli.campaign.bench import run_cells
from torchscout.cli.campaign.cell import Cell, Row
from torchscout.cli.campaign.hanging import device_hang_cells
from torchscout.cli.campaign.layout import Hardware
from torchscout.cli.campaign.paper import paper_cells
from torchscout.cli.campaign.result import Result
from torchscout.cli.campaign.rows import DEVICE_ROWS, ROWS
from torchscout.cli.campaign.summary import RowSummary, as_report
from torchscout.cli.campaign.table import screen_of

__all__ = ["ABLATION", "MODULES", "PAPER", "Campaign", "paper_on"]

MODULES = (
    "torch._dynamo",  # comes with the first optimizer
    "torchscout.cli.campaign.ablation.in_process",
    "torchscout.cli.campaign.observed",
    "torchscout.cli.campaign.recovery",
    "torchscout.cli.campaign.routed_job",
    "torchscout.cli.campaign.warm",
    "torchscout.session.checkpoint_manager",
)
"""What ranks need; the server that they are forked from imports it once."""


@dataclass(frozen=True, slots=True)
class Campaign:
    name: str
    rows: tuple[Row, ...]
    cells: Callable[[int], list[Cell]]
    """Of a seed."""
    sample: Mapping[str, int]
    """How many cells of a row a quick run has; of others, one."""
    run: Callable[[Sequence[Cell], Path, int, int], Generator[Result, None, None]]
    """Of cells, a folder, the seed and how many at once."""
    told: Callable[[int, Sequence[RowSummary], Sequence[Result], str], tuple[dict[str, Any], str]]
    """Of the seed, the table, all results and the folder: one document, and a screen."""


def _told_of_paper(
    seed: int, summaries: Sequence[RowSummary], results: Sequence[Result], folder: str
) -> tuple[dict[str, Any], str]:
    return as_report("paper", seed, summaries, results), screen_of(summaries, results, folder)


def _told_of_ablation(
    seed: int, summaries: Sequence[RowSummary], results: Sequence[Result], folder: str
) -> tuple[dict[str, Any], str]:
    report = as_report("ablation", seed, summaries, results)
    report["ablations"] = of_ablation.ablations(results)
    return report, of_ablation.screen_of(report, folder)


PAPER = Campaign(
    "paper",
    ROWS,
    paper_cells,
    {"numerical-sdc": 8, "numerical-clean": 2, "hang": 6, "hang-clean": 2},
    run_cells,
    _told_of_paper,
)


def paper_on(hardware: Hardware) -> Campaign:
    """The paper's campaign; on CUDA with what only a device can show."""
    if hardware.device == "cpu":
        return PAPER
    return replace(
        PAPER,
        rows=(*ROWS, *DEVICE_ROWS),
        cells=lambda seed: [*paper_cells(seed), *device_hang_cells(seed)],
    )


ABLATION = Campaign(
    "ablation",
    ABLATION_ROWS,
    ablation_cells,
    {"sdc": 6, "transient": 2, "nondeterminism": 2, "hang": 6},
    run_ablated,
    _told_of_ablation,
)
