"""Which steps of one long training belong to which cell. Pure.

A cell's protocol is the paper's: a clean step, the fault, a clean step. The clean step after one cell is
the one before the next, so that a cell takes the steps of its fault and one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torchscout.cli.campaign.cell import Cell
from torchscout.faults.fault import SiteKind
from torchscout.faults.plan import Fault, FaultPlan

__all__ = ["WARMUP", "Slot", "planned", "scheduled"]

WARMUP = 4
"""Steps before the first cell: what replay does for the first time is slow, and the last of them is clean."""
_CLEAN_STEPS = 2
"""Besides the clean step before it, of a cell without faults."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One cell's steps, and what happens in them."""

    cell: Cell
    first: int
    """What is reported from here on is the cell's."""
    last: int
    faults: FaultPlan = field(default_factory=FaultPlan)
    """With steps as training counts them."""
    restored_after: int | None = None
    """The step after which all ranks get back the state from before it, where the fault has spoiled that."""
    waits: int = 0
    """Steps for which nothing happens but that replay comes to the right layer."""


def scheduled(cells: Sequence[Cell], layers: int) -> list[Slot]:
    """Every cell once: next comes the first that finds replay at the layer it needs."""
    left, slots = list(cells), list[Slot]()
    while left:
        done = slots[-1].last if slots else WARMUP
        candidates = [_slot(cell, slots[-1].last if slots else 0, done, layers) for cell in left]
        soonest = min(candidates, key=lambda slot: slot.waits)
        slots.append(soonest)
        left.remove(soonest.cell)
    return slots


def planned(slots: Sequence[Slot]) -> FaultPlan:
    """All that is going to happen."""
    return FaultPlan(tuple(fault for slot in slots for fault in slot.faults))


def _slot(cell: Cell, before: int, done: int, layers: int) -> Slot:
    if not cell.faults:
        return Slot(cell, before + 1, done + _CLEAN_STEPS)
    begin, offset, waits = min(fault.steps[0] for fault in cell.faults), done - 1, 0
    assert begin > 1, f"{cell.identity} has no clean step before its fault"
    while cell.due is not None and (offset + waits + begin - 1) % layers != cell.due:
        waits += 1
    moved = FaultPlan(tuple(_later(fault, offset + waits) for fault in cell.faults))
    end = max(fault.steps[-1] for fault in moved)
    spoils = any(fault.place.kind is SiteKind.STATE for fault in moved)
    return Slot(cell, before + 1, end + 1, moved, end if spoils else None, waits)


def _later(fault: Fault, steps: int) -> Fault:
    assert isinstance(fault.when, range), "a cell's faults happen in steps that are known"
    return replace(fault, when=range(fault.when.start + steps, fault.when.stop + steps, fault.when.step))
