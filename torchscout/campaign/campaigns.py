"""Which campaigns there are, which cells of one are selected, and on which bench each cell runs."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from torchscout.campaign.ablation import variants as of_ablation
from torchscout.campaign.ablation.runner import run_ablated
from torchscout.campaign.ablation.variants import ROWS as ABLATION_ROWS
from torchscout.campaign.ablation.variants import ablation_cells
from torchscout.campaign.cell import DEVICE_ROWS, ROWS, Cell, Hardware, Processes, Row
from torchscout.campaign.grading import Flaw, Grade
from torchscout.campaign.moe import run_routed
from torchscout.campaign.observed import run_observed
from torchscout.campaign.paper_cells import device_hang_cells, paper_cells
from torchscout.campaign.recovery import run_recovery
from torchscout.campaign.results import Result, RowSummary, as_report, found_in
from torchscout.campaign.tables import screen_of
from torchscout.campaign.warm import run_warm

__all__ = [
    "ABLATION",
    "MODULES",
    "PAPER",
    "Campaign",
    "chosen",
    "paper_on",
    "run_cells",
    "run_kernel",
    "sampled",
]

_ORDER = (Processes.WARM, Processes.RECOVERY, Processes.ROUTED, Processes.KERNEL, Processes.OBSERVED)
"""Many results first. Cells that kill their ranks come last: a shared CUDA device recovers from each."""


def run_cells(cells: Sequence[Cell], folder: Path, seed: int, jobs: int) -> Generator[Result, None, None]:
    """Results as they come. ``jobs`` hangs are run at once, since they mostly wait; over NCCL one at a time,
    because jobs that share a device wait inside NCCL for each other's multiprocessors.
    """
    ordered = sorted(cells, key=lambda cell: (_ORDER.index(cell.processes), cell.layout))
    for (processes, layout), group in groupby(ordered, key=_group):
        together = list(group)
        place = folder / "evidence" / f"{processes}-{layout}"
        if processes == Processes.WARM.value:
            yield from run_warm(together, place, seed)
        elif processes == Processes.RECOVERY.value:
            yield from run_recovery(together, place)
        elif processes == Processes.ROUTED.value:
            yield from run_routed(together, place)
        elif processes == Processes.KERNEL.value:
            yield from run_kernel(together, place)
        else:
            is_shared = together[0].place.backend == "nccl"
            yield from run_observed(together, place, 1 if is_shared else jobs)


def _group(cell: Cell) -> tuple[str, str]:
    return cell.processes.value, cell.layout


_SECONDS = 600.0
_REASON_CHARACTERS = 600


def run_kernel(cells: Sequence[Cell], folder: Path) -> Generator[Result, None, None]:
    """One after another; the evidence of those that fail stays in ``folder``."""
    for cell in cells:
        begin = time.monotonic()
        try:
            yield _run(cell, folder / cell.name)
        except (subprocess.SubprocessError, ValueError) as error:
            grade = Grade(Flaw.BROKEN, f"its process failed: {_told(error)}")
            took = time.monotonic() - begin
            yield found_in(cell, grade, [], happened=None, took_seconds=took)


def _run(cell: Cell, place: Path) -> Result:
    """On CUDA the kernel is compiled. CPU ranks have no device; without ranks one is used if it is there."""
    is_on_cpu = cell.place.device == "cpu"
    is_interpreted = is_on_cpu and (bool(cell.faults) or not torch.cuda.is_available())
    done = subprocess.run(
        [sys.executable, "-m", "torchscout.campaign.kernel_process", place],
        input=pickle.dumps(cell),
        capture_output=True,
        check=True,
        timeout=_SECONDS,
        env=os.environ | ({"TRITON_INTERPRET": "1"} if is_interpreted else {}),
    )
    return Result.from_json(json.loads(done.stdout))


def _told(error: Exception) -> str:
    written = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else ""
    return (written.splitlines()[-1] if written else str(error))[:_REASON_CHARACTERS]


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


MODULES = (
    "torch._dynamo",  # comes with the first optimizer
    "torchscout.campaign.ablation.watchdog",
    "torchscout.campaign.observed",
    "torchscout.campaign.recovery",
    "torchscout.campaign.moe",
    "torchscout.campaign.warm",
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
