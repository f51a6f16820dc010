"""Cells that perturb the expert kernel: run as a process, in which Triton may interpret the kernel."""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from torchscout.campaign.cells.cell import Cell
from torchscout.campaign.cells.moe import PROGRAMS, TILE, Job, run_job, speed_up_interpreter
from torchscout.campaign.cells.paper_cells import KERNEL_SHAPES, SHAPES, Turns
from torchscout.campaign.cells.training import retried
from torchscout.campaign.grading import Flaw, Grade
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
"""Expert layers of a job; an interpreted kernel is slow."""

_FEATURES = {"up": (18, 24), "down": (24, 18)}
"""Hidden and intermediate features; no multiple of a tile in any direction."""
_SHAPES: tuple[Rows, ...] = ((0, 5), (4, 8), (8, 16), (16, 0), (16, 16), (17, 24))
"""Rows of two experts: none, less than half a tile, more, whole tiles, and more than a tile."""
_DEVICE_TILES = 16
"""About how many times longer and wider a tile on a device is than an interpreted one."""


def profile(rank: int, spread: int, shapes: Sequence[int], catalog: Path, device: str) -> None:  # noqa: ARG001
    """Save a catalog of the kernel's profiles. Runs in its own process, which leaves the device to the ranks.

    ``spread`` ranks share the experts of one replica.
    """
    speed_up_interpreter()
    programs, tiling = (PROGRAMS, Tiling(*TILE)) if INTERPRETED else (None, None)
    profilers = {
        f"{hidden}x{intermediate}": KernelProfiler(
            hidden, intermediate, EXPERTS // spread, device=device, programs=programs, tiling=tiling
        )
        for hidden, intermediate in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
    }
    save_catalog(profilers, spread, shapes, catalog, LAYERS)


def perturb_all(cell: Cell) -> Result:
    """Discover representative shapes, then perturb every work item of theirs."""
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
    return replace(Result.of(cell, grade_of(found), time.monotonic() - begin, detail=detail), is_clean=False)


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
"""Steps from the fault on, to see that an ongoing fault is not reported again."""


def main(place: Path) -> None:
    cell: Cell = pickle.loads(sys.stdin.buffer.read())
    torch.set_num_threads(1)  # tiles are small
    speed_up_interpreter()
    result = _localized(cell, place) if cell.faults else perturb_all(cell)
    print(json.dumps(result.to_json()))


def _localized(cell: Cell, place: Path) -> Result:
    """Run a job in which one rank's kernel is perturbed after a clean cycle."""
    preload("torch._dynamo", "torchscout.campaign.cells.moe", "torchscout.faults.faulty_gemm")
    device, catalog = cell.place.device, place.with_suffix(".catalog.json")
    shapes = KERNEL_SHAPES if INTERPRETED else SHAPES
    place.parent.mkdir(parents=True, exist_ok=True)
    retried(lambda: run_ranks(profile, 1, cell.place.experts, shapes, catalog, device, timeout=_SECONDS))
    # Where a device runs several shapes alike, one of them represents all.
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
