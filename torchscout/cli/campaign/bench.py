"""Runs cells, each in the processes it needs (paper, evaluation)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import groupby
from pathlib import Path

from torchscout.cli.campaign.cell import Cell, Processes
from torchscout.cli.campaign.kernel_bench import run_kernel
from torchscout.cli.campaign.observed_bench import run_observed
from torchscout.cli.campaign.recovery_bench import run_recovery
from torchscout.cli.campaign.result import Result
from torchscout.cli.campaign.routed_bench import run_routed
from torchscout.cli.campaign.warm_bench import run_warm

__all__ = ["run_cells"]

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
