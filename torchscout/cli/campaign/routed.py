"""Cells of mixtures of experts: wrong weights, and wrong work inside the kernel (paper, evaluation)."""

from __future__ import annotations

from torchscout.cli.campaign.cell import Cell, Processes
from torchscout.cli.moe_model import LAYERS, experts_at
from torchscout.faults.fault import since
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import LayerKind

__all__ = ["KERNEL_SHAPES", "SHAPES", "WORK", "Turns", "routed_cells"]

SHAPES = (128, 512)
"""Rows of each expert, the catalog's shapes."""
KERNEL_SHAPES = (4, 16)
"""The same where Triton interprets the kernel: a part of a tile, and a whole one."""
WORK = "work-items"
"""How cells are called that perturb each of them."""


class Turns:
    """What a cycle of checks replays: each layer's experts, at one shape after another."""

    def __init__(self, shapes: tuple[int, ...], layers: int) -> None:
        self._turns = [(rows, layer) for rows in shapes for layer in range(layers)]

    def __len__(self) -> int:
        return len(self._turns)

    def second(self, rows: int, layer: int = 0) -> int:
        """The step with which its turn comes again, one check having been made after each step."""
        return len(self) + self._turns.index((rows, layer)) + 1

    def target(self, step: int) -> str:
        """What is due after this step, as records name it."""
        rows, layer = self._turns[(step - 1) % len(self)]
        return f"{experts_at(layer)} x{rows}"


def routed_cells(seed: int) -> list[Cell]:
    """Two of wrong weights, one without a fault, and four of the kernel."""
    at, turns = experts_at(0), Turns(SHAPES, LAYERS)
    weights = {
        f"rows-{rows}": FaultPlan()
        .flip_bit(rank=15, at=f"{at}/up", step=turns.second(rows), bit=12)
        .showing(f"{at}/parameters", role=LayerKind.EXPERT)
        for rows in SHAPES
    }
    kernel_turns = Turns(KERNEL_SHAPES, 1)
    sick = {
        layout: FaultPlan()
        .perturb_kernel(rank=rank, at=f"{at}/forward", step=since(kernel_turns.second(KERNEL_SHAPES[0])))
        .showing(role=LayerKind.EXPERT)
        for layout, rank in (("ep2", 7), ("ep4", 15))
    }
    return [
        *(
            Cell("moe-sdc", name, "ep4", Processes.ROUTED, faults, seed=seed)
            for name, faults in weights.items()
        ),
        Cell("moe-clean", "clean", "ep4", Processes.ROUTED, seed=seed),
        *(
            Cell("moe-kernel", f"{WORK}-{projection}", "alone", Processes.KERNEL, seed=seed)
            for projection in ("up", "down")
        ),
        *(
            Cell("moe-kernel", "persistent", layout, Processes.KERNEL, faults, seed=seed)
            for layout, faults in sick.items()
        ),
    ]
