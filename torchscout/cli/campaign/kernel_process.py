"""The process in which a cell of the expert kernel runs: a cell comes in, its result goes out.

Started by ``kernel_bench``, perhaps with Triton's interpreter. Needs Triton.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import torch

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.interpreter import hasten
from torchscout.cli.campaign.kernel_work import perturb_all
from torchscout.cli.campaign.result import Result
from torchscout.cli.campaign.routed import KERNEL_SHAPES, Turns
from torchscout.cli.campaign.routed_bench import run_job
from torchscout.cli.campaign.routed_job import PROGRAMS, TILE, Job
from torchscout.cli.local_ranks import preload
from torchscout.cli.moe_catalog import save_catalog
from torchscout.cli.moe_model import EXPERTS, HIDDEN, WIDTH
from torchscout.evidence.catalog.grouped_gemm import Tiling
from torchscout.evidence.catalog.kernel_profiler import KernelProfiler

__all__ = ["main"]

_LAYERS = 1
"""Of experts; an interpreted kernel is slow."""
_BEYOND = 2
"""Steps from the fault on: what goes on is not reported again."""


def main(place: Path) -> None:
    cell: Cell = pickle.loads(sys.stdin.buffer.read())
    torch.set_num_threads(1)  # tiles are small
    hasten()
    result = _localized(cell, place) if cell.faults else perturb_all(cell)
    print(json.dumps(result.to_json()))


def _localized(cell: Cell, place: Path) -> Result:
    """A job in which one rank's kernel falls ill, after a clean cycle."""
    preload("torch._dynamo", "torchscout.cli.campaign.routed_job", "torchscout.faults.sick_gemm")
    turns, catalog = Turns(KERNEL_SHAPES, _LAYERS), place.with_suffix(".catalog.json")
    place.parent.mkdir(parents=True, exist_ok=True)
    held = EXPERTS // cell.place.experts
    profilers = {
        f"{hidden}x{intermediate}": KernelProfiler(
            hidden, intermediate, held, device="cpu", programs=PROGRAMS, tiling=Tiling(*TILE)
        )
        for hidden, intermediate in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
    }
    save_catalog(profilers, cell.place.experts, KERNEL_SHAPES, catalog, _LAYERS)
    steps = turns.second(KERNEL_SHAPES[0]) + _BEYOND - 1
    return run_job(cell, place, Job(steps, catalog, _LAYERS, is_kernel=True), turns)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
