"""`scout campaign paper`: the cells of the paper's table of fault-injection coverage (paper, evaluation)."""

from __future__ import annotations

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.corrupted import recovery_cells
from torchscout.cli.campaign.hanging import hang_cells
from torchscout.cli.campaign.numerical import numerical_cells
from torchscout.cli.campaign.routed import routed_cells
from torchscout.cli.campaign.slow import slow_cells

__all__ = ["paper_cells"]


def paper_cells(seed: int) -> list[Cell]:
    """All of them; the same for the same seed."""
    return [
        *recovery_cells(seed),
        *numerical_cells(seed),
        *slow_cells(seed),
        *routed_cells(seed),
        *hang_cells(seed),
    ]
