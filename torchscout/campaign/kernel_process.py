"""Cells inside the kernel of experts, in a process of their own with Triton's interpreter."""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from torchscout.campaign.cell import Cell
from torchscout.campaign.grading import Flaw, Grade
from torchscout.campaign.moe import PROGRAMS, TILE, Job, hasten, run_job
from torchscout.campaign.observed import retried
from torchscout.campaign.paper_cells import KERNEL_SHAPES, SHAPES, Turns
from torchscout.campaign.results import Result
from torchscout.experts.catalog import load
from torchscout.experts.coverage import Rows, tabulated
from torchscout.experts.discovery import discover
from torchscout.experts.kernel.grouped_gemm import Tiling
from torchscout.experts.kernel.perturbation import Qualification, qualify
from torchscout.experts.kernel.profiler import KernelProfiler
from torchscout.experts.kernel.triton_kernel import INTERPRETED
from torchscout.testing.local_ranks import preload, run_ranks
from torchscout.testing.moe_model import EXPERTS, HIDDEN, WIDTH, experts_at, save_catalog

__all__ = ["LAYERS", "grade_of", "main", "perturb_all", "profile"]

LAYERS = 1
"""Of experts, where ranks train; an interpreted kernel is slow."""

_FEATURES = {"up": (18, 24), "down": (24, 18)}
"""Hidden and intermediate; tiles are cut off in every direction."""
_SHAPES: tuple[Rows, ...] = ((0, 5), (4, 8), (8, 16), (16, 0), (16, 16), (17, 24))
"""Rows of two experts: none, less than half a tile, more, whole tiles and some more."""
_DEVICE_TILES = 16
"""A tile of the device's is that many times as long and wide as an interpreted one, or nearly so."""


def profile(rank: int, spread: int, shapes: Sequence[int], catalog: Path, device: str) -> None:  # noqa: ARG001
    """Save a catalog of the kernel's own profiles, in a process that ends: ranks are to have the device.

    ``spread`` ranks share the experts of one replica.
    """
    hasten()
    programs, tiling = (PROGRAMS, Tiling(*TILE)) if INTERPRETED else (None, None)
    profilers = {
        f"{hidden}x{intermediate}": KernelProfiler(
            hidden, intermediate, EXPERTS // spread, device=device, programs=programs, tiling=tiling
        )
        for hidden, intermediate in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
    }
    save_catalog(profilers, spread, shapes, catalog, LAYERS)


def perturb_all(cell: Cell) -> Result:
    """Discover which shapes stand for all, then perturb all that those do."""
    begin, is_device = time.monotonic(), torch.cuda.is_available()
    scale, tiling = (_DEVICE_TILES, None) if is_device else (1, Tiling(*TILE))
    hidden, intermediate = (scale * each for each in _FEATURES[cell.name.rpartition("-")[2]])
    profiler = KernelProfiler(
        hidden,
        intermediate,
        len(_SHAPES[0]),
        device="cuda" if is_device else "cpu",
        programs=None if is_device else PROGRAMS,
        tiling=tiling,
    )
    shapes = [tuple(scale * rows for rows in shape) for shape in _SHAPES]
    table = tabulated(cell.name, profiler.facts(), "shapes around a tile", discover(profiler, shapes))
    found = qualify(profiler.projection, table.representatives)
    detail = (
        f"{found.changed} of {found.injected} perturbed work items of {len(table.representatives)} shapes, "
        f"which stand for {table.admitted}, changed the output or a gradient"
    )
    took = time.monotonic() - begin
    return Result(
        cell.identity,
        cell.row,
        False,
        grade_of(found),
        None,
        took,
        detail=detail,
        ranks=cell.place.ranks,
        device=cell.place.device,
        backend=cell.place.backend,
    )


def grade_of(found: Qualification) -> Grade:
    if found.complete:
        return Grade()
    if found.fired < found.injected:
        return Grade(Flaw.NOT_INJECTED, f"{found.injected - found.fired} did not happen: {found.missed}")
    if found.changed < found.injected:
        return Grade(Flaw.MISSED, f"{found.injected - found.changed} changed nothing: {found.missed}")
    return Grade(Flaw.BROKEN, f"not all work was perturbed: {found.unaccounted[0]}")


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
    preload("torch._dynamo", "torchscout.campaign.moe", "torchscout.faults.faulty_gemm")
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
