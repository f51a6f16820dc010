"""Cells of slow ranks and slow links (paper, evaluation)."""

from __future__ import annotations

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.layout import BLOCKS
from torchscout.faults.plan import FaultPlan

__all__ = ["SLOW", "slow_cells", "slow_layers"]

SLOW = range(6, 10)
"""Two rounds are enough for an incident, unless the machine is noisy. Before them there are clean ones, from
which replay learns how noisy it is."""
_SECONDS = 0.25


def slow_layers(rank: int, steps: range) -> FaultPlan:
    """Whichever layer is replayed."""
    faults = FaultPlan()
    for block in range(BLOCKS):
        at = f"blocks.{block}/forward"
        faults = faults.delay(rank=rank, at=at, step=steps, seconds=_SECONDS, calls=None)
    return faults


def slow_cells(seed: int) -> list[Cell]:
    ranks = [
        Cell("compute-straggler", "rank-9", layout, faults=slow_layers(9, SLOW), seed=seed)
        for layout in ("ddp", "hsdp", "fsdp2")
    ]
    link = FaultPlan().slow_collective(
        ranks=(15,), at="all_reduce@mesh_tensor", axis="tensor", step=SLOW, seconds=_SECONDS
    )
    return [*ranks, Cell("communication-straggler", "rank-15", "tensor", faults=link, seed=seed)]
