"""The campaigns, the selection of their cells, and the processes that each cell runs in."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from torchscout.campaign.ablation import variants
from torchscout.campaign.ablation.runner import judged_warm, run_ablated_hangs
from torchscout.campaign.cells.cell import DEVICE_ROWS, ROWS, Cell, Hardware, Processes, Row
from torchscout.campaign.cells.loop import LOOP_ROWS, loop_cells, run_loop
from torchscout.campaign.cells.moe import run_routed
from torchscout.campaign.cells.observed import run_observed
from torchscout.campaign.cells.paper_cells import device_hang_cells, paper_cells
from torchscout.campaign.cells.recovery import run_recovery
from torchscout.campaign.cells.warm import run_warm
from torchscout.campaign.results import Result, as_report
from torchscout.campaign.tables import screen_of

__all__ = [
    "ABLATION",
    "MODULES",
    "PAPER",
    "RECOVERY",
    "Campaign",
    "chosen",
    "paper_on",
    "run_kernel",
    "sampled",
]

_SECONDS = 600.0
_QUICK_LAYOUTS = ("ddp", "hsdp")
"""A quick run has 16 ranks in one of these only, where a row has the choice: starting them takes longest."""
MODULES = (
    "torch._dynamo",  # comes with the first optimizer
    "torchscout.campaign.ablation.watchdog",
    "torchscout.campaign.cells.observed",
    "torchscout.campaign.cells.recovery",
    "torchscout.campaign.cells.moe",
    "torchscout.campaign.cells.warm",
    "torchscout.session.checkpoints.manager",
)
"""What ranks need; the server that they are forked from imports it once."""

_Bench = Callable[[list[Cell], Path, int, int], Iterator[Result]]
"""Runs cells of one layout, given a folder for evidence, the seed, and how many hangs may run at once."""
_Benches = Mapping[Processes, _Bench]


def run_kernel(cells: Sequence[Cell], folder: Path) -> Generator[Result, None, None]:
    """Run one cell after another; the evidence of those that fail stays in ``folder``."""
    for cell in cells:
        begin = time.monotonic()
        try:
            yield _run_process(cell, folder / cell.name)
        except (subprocess.SubprocessError, ValueError) as error:
            written = (
                error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else ""
            )
            reason = written.splitlines()[-1] if written else str(error)
            yield Result.broken(cell, "its process failed", reason, time.monotonic() - begin)


def _run_process(cell: Cell, place: Path) -> Result:
    """CUDA ranks compile the kernel, CPU ranks interpret it; without ranks, a device is used if present."""
    is_on_cpu = cell.place.device == "cpu"
    is_interpreted = is_on_cpu and (bool(cell.faults) or not torch.cuda.is_available())
    done = subprocess.run(
        [sys.executable, "-m", "torchscout.campaign.cells.kernel_process", place],
        input=pickle.dumps(cell),
        capture_output=True,
        check=True,
        timeout=_SECONDS,
        env=os.environ | ({"TRITON_INTERPRET": "1"} if is_interpreted else {}),
    )
    return Result.from_json(json.loads(done.stdout))


def _run_hangs(cells: list[Cell], folder: Path, _: int, jobs: int) -> Iterator[Result]:
    """Jobs that share a device wait inside NCCL for each other's multiprocessors: one at a time there."""
    return run_observed(cells, folder, 1 if cells[0].place.backend == "nccl" else jobs)


_PAPER_BENCHES: _Benches = {
    Processes.WARM: lambda cells, folder, seed, _: run_warm(cells, folder, seed),
    Processes.RECOVERY: lambda cells, folder, *_: run_recovery(cells, folder),
    Processes.ROUTED: lambda cells, folder, *_: run_routed(cells, folder),
    Processes.KERNEL: lambda cells, folder, *_: run_kernel(cells, folder),
    Processes.OBSERVED: _run_hangs,
}
"""In this order: many results first, and cells that kill their ranks last, since a shared CUDA device needs
time to recover from each."""
_RECOVERY_BENCHES: _Benches = {Processes.LOOP: lambda cells, folder, *_: run_loop(cells, folder)}
_ABLATION_BENCHES: _Benches = {
    Processes.OBSERVED: lambda cells, folder, _, jobs: run_ablated_hangs(cells, folder, jobs),
    Processes.WARM: lambda cells, folder, seed, _: judged_warm(cells, folder, seed),
}


def _run(
    benches: _Benches, cells: Sequence[Cell], folder: Path, seed: int, jobs: int
) -> Generator[Result, None, None]:
    """Yield results as they come; cells of one layout run together."""
    order = list(benches)
    ordered = sorted(cells, key=lambda cell: (order.index(cell.processes), cell.layout))
    for (processes, layout), together in groupby(ordered, key=lambda cell: (cell.processes, cell.layout)):
        place = folder / "evidence" / f"{processes.value}-{layout}"
        yield from benches[processes](list(together), place, seed, jobs)


def chosen(cells: Sequence[Cell], rows: Sequence[Row], pattern: str) -> list[Cell]:
    """The cells whose identity, or the beginning of it, matches. Raises ``ValueError`` if none does."""
    patterns = (pattern, f"{pattern}@*", f"{pattern}/*")
    matching = [cell for cell in cells if any(fnmatchcase(cell.identity, each) for each in patterns)]
    if matching:
        return matching
    raise ValueError(
        f"no cell matches {pattern!r}; a pattern is ROW, ROW/LAYOUT or ROW/LAYOUT/NAME with * for anything, "
        f"and the rows are {', '.join(row.key for row in rows)}"
    )


def sampled(cells: Sequence[Cell], seed: int, counts: Mapping[str, int]) -> list[Cell]:
    """As many cells of every row as ``counts`` says, or one; the same for the same seed."""
    choose = random.Random(seed)
    layout = choose.choice(_QUICK_LAYOUTS)
    found: list[Cell] = []
    for row in dict.fromkeys(cell.row for cell in cells):
        every = [cell for cell in cells if cell.row == row]
        candidates = [cell for cell in every if cell.layout == layout] or every
        wanted = set(choose.sample(range(len(candidates)), min(counts.get(row, 1), len(candidates))))
        found += [cell for place, cell in enumerate(candidates) if place in wanted]
    return found


_Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Campaign:
    name: str
    rows: tuple[Row, ...]
    cells: Callable[[int], list[Cell]]
    """Its cells, for a seed."""
    sample: Mapping[str, int]
    """How many cells of a row a quick run has; one of each other row."""
    run: Callable[[Sequence[Cell], Path, int, int], Generator[Result, None, None]]
    """Takes cells, a folder, the seed and how many hangs may run at once."""
    report: Callable[[int, _Rows, Sequence[Result], str], tuple[dict[str, Any], str]]
    """Takes the seed, the table's rows, all results and the folder; returns the document and the screen."""


def _report(
    name: str, seed: int, rows: _Rows, results: Sequence[Result], folder: str
) -> tuple[dict[str, Any], str]:
    return as_report(name, seed, rows, results), screen_of(rows, results, folder)


def _report_ablation(
    seed: int, rows: _Rows, results: Sequence[Result], folder: str
) -> tuple[dict[str, Any], str]:
    report = as_report("ablation", seed, rows, results) | {"ablations": variants.ablations(results)}
    return report, variants.screen_of(report, folder)


PAPER = Campaign(
    "paper",
    ROWS,
    paper_cells,
    {"numerical-sdc": 8, "numerical-clean": 2, "hang": 6, "hang-clean": 2},
    partial(_run, _PAPER_BENCHES),
    partial(_report, "paper"),
)
RECOVERY = Campaign(
    "recovery", LOOP_ROWS, loop_cells, {}, partial(_run, _RECOVERY_BENCHES), partial(_report, "recovery")
)
ABLATION = Campaign(
    "ablation",
    variants.ROWS,
    variants.ablation_cells,
    {"sdc": 6, "transient": 2, "nondeterminism": 2, "hang": 6},
    partial(_run, _ABLATION_BENCHES),
    _report_ablation,
)


def paper_on(hardware: Hardware) -> Campaign:
    """The paper's campaign; on CUDA it has a row more, for hangs of a device."""
    if hardware.device == "cpu":
        return PAPER
    return replace(
        PAPER,
        rows=(*ROWS, *DEVICE_ROWS),
        cells=lambda seed: [*paper_cells(seed), *device_hang_cells(seed)],
    )
