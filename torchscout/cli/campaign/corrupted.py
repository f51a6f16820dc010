"""Cells of persistent corruption after two accepted checks, and recovery from it (paper, evaluation)."""

from __future__ import annotations

from torchscout.cli.campaign.cell import Cell, Processes
from torchscout.cli.campaign.numerical import REPLAYED
from torchscout.faults.fault import since
from torchscout.faults.plan import FaultPlan

__all__ = ["recovery_cells"]

_FAULTY = 3
"""After two accepted checks."""


def recovery_cells(seed: int) -> list[Cell]:
    """Rank 9's, each where its layout has something of the kind."""
    parameter = FaultPlan().flip_bit(rank=9, at="blocks.1.up/weight", step=since(_FAULTY), bit=12)
    # Whichever layer is replayed: a sick chip does not wait for its turn.
    output = FaultPlan().flip_bit(rank=9, at="head/output", step=since(_FAULTY), bit=12, calls=REPLAYED)
    gradient = FaultPlan().scale(rank=9, at="blocks.1.up/weight.grad", step=since(_FAULTY), factor=-3.0)
    return [
        Cell("dense-sdc", name, layout, Processes.RECOVERY, faults, seed=seed)
        for name, layout, faults in (
            ("parameter", "ddp", parameter),
            ("replay-output", "fsdp2", output),
            ("gradient-shard", "hsdp", gradient),
        )
    ]
