"""Adapts cells to the hardware that a campaign runs on, or says why they cannot run there. Pure.

The same faults on the same kind of job. With fewer ranks a fault moves to the corresponding rank, and what
must be reported follows from the smaller mesh. On CUDA a slow layer is a slow kernel, not a slow host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torchscout.cli.campaign.cell import Cell, Processes
from torchscout.cli.campaign.layout import LAYOUTS, Hardware
from torchscout.decision.record import Manifestation
from torchscout.faults.effects import DeviceSpin, Sleep
from torchscout.faults.fault import SiteKind
from torchscout.faults.ground_truth import GroundTruth
from torchscout.faults.plan import Fault, FaultPlan

__all__ = ["Skipped", "counted_by_reason", "fitted"]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A cell that is not run."""

    cell: str
    """``ROW/LAYOUT/NAME``."""
    row: str
    reason: str

    def to_json(self) -> dict[str, str]:
        return {"cell": self.cell, "row": self.row, "reason": self.reason}


def counted_by_reason(skipped: Iterable[Skipped]) -> list[str]:
    """A line for each row and reason: a row may have hundreds of cells."""
    counts = Counter((each.row, each.reason) for each in skipped)
    return [f"skipped    {count} of {row}: {reason}" for (row, reason), count in counts.items()]


def fitted(
    cells: Iterable[Cell], hardware: Hardware, *, with_triton: bool = True
) -> tuple[list[Cell], list[Skipped]]:
    """Those that can run, and those that cannot."""
    fit: list[Cell] = []
    skipped: list[Skipped] = []
    for cell in cells:
        layout = hardware.fit(cell.layout)
        name = f"{cell.row}/{cell.layout}/{cell.name}"
        if layout is None:
            reason = (
                f"{LAYOUTS[cell.layout].title} needs more than {hardware.max_ranks} ranks, also if reduced"
            )
            skipped.append(Skipped(name, cell.row, reason))
        elif cell.processes is Processes.KERNEL and not with_triton:
            skipped.append(Skipped(name, cell.row, "the expert kernel needs Triton: pip install triton"))
        else:
            share = layout.ranks / LAYOUTS[cell.layout].ranks
            faults = FaultPlan(tuple(_moved(fault, share, hardware.device) for fault in cell.faults))
            moved = replace(cell, hardware=hardware, faults=faults)
            fit.append(replace(moved, coarser=_coarser(cell.truths, moved.truths)))
    return fit, skipped


def _coarser(planned: Sequence[GroundTruth], here: Sequence[GroundTruth]) -> str:
    """Of two peers nobody can say which one is wrong, so that both must be reported."""
    for before, after in zip(planned, here, strict=True):
        if len(after.ranks) > len(before.ranks):
            scope = after.scope.value.replace("_", " ")
            return f"{scope} of {len(after.ranks)} ranks instead of {len(before.ranks)}"
    return ""


def _moved(fault: Fault, share: float, device: str) -> Fault:
    """The same fault on the rank that is as far along, and on the device where it is about computing."""
    is_slow_work = fault.manifestation is Manifestation.STRAGGLER and fault.place.kind is SiteKind.PASS
    effect = fault.effect
    if device == "cuda" and is_slow_work and type(effect) is Sleep:
        effect = DeviceSpin(effect.seconds)
    return replace(fault, rank=int(fault.rank * share), effect=effect)
