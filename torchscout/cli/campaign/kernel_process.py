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
from torchscout.cli.campaign.kernel_work import LAYERS, perturb_all, profile
from torchscout.cli.campaign.result import Result
from torchscout.cli.campaign.routed import KERNEL_SHAPES, SHAPES, Turns
from torchscout.cli.campaign.routed_bench import run_job
from torchscout.cli.campaign.routed_job import Job
from torchscout.cli.campaign.starting import retried
from torchscout.cli.local_ranks import preload, run_ranks
from torchscout.cli.moe_model import experts_at
from torchscout.experts.catalog import load
from torchscout.experts.kernel.triton_kernel import INTERPRETED

__all__ = ["main"]

_SECONDS = 300.0
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
    preload("torch._dynamo", "torchscout.cli.campaign.routed_job", "torchscout.faults.faulty_gemm")
    device, catalog = cell.place.device, place.with_suffix(".catalog.json")
    shapes = KERNEL_SHAPES if INTERPRETED else SHAPES
    place.parent.mkdir(parents=True, exist_ok=True)
    retried(lambda: run_ranks(profile, 1, cell.place.experts, shapes, catalog, device, timeout=_SECONDS))
    # Where the device runs several of the shapes alike, one of them stands for all.
    chosen = load(catalog).representatives(experts_at(0), 0)
    turns = Turns(tuple(rows[0] for rows in chosen), LAYERS)
    job = Job(
        min(fault.steps[0] for fault in cell.faults) + _BEYOND - 1,
        catalog,
        LAYERS,
        is_kernel=True,
        is_interpreted=INTERPRETED,
    )
    return run_job(cell, place, job, turns)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
