"""Perturbs every work item of the shapes that stand for others, one at a time (paper, section 6.2).

On the device where there is one; else small tiles in Triton's interpreter. Needs Triton.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.grading import Flaw, Grade
from torchscout.cli.campaign.interpreter import hasten
from torchscout.cli.campaign.result import Result
from torchscout.cli.campaign.routed_job import PROGRAMS, TILE
from torchscout.cli.moe_catalog import save_catalog
from torchscout.cli.moe_model import EXPERTS, HIDDEN, WIDTH
from torchscout.experts.coverage import Rows, tabulated
from torchscout.experts.discovery import discover
from torchscout.experts.kernel.grouped_gemm import Tiling
from torchscout.experts.kernel.perturbation import Qualification, qualify
from torchscout.experts.kernel.profiler import KernelProfiler
from torchscout.experts.kernel.triton_kernel import INTERPRETED

__all__ = ["LAYERS", "grade_of", "perturb_all", "profile"]

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
