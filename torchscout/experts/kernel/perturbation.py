"""Tests that a fault in any work item of a shape changes a result (paper, section 6.2).

Work items are perturbed one at a time inside the kernel, never in its operands or results. The kernel's own
counters prove that none was missed: every counted tile and step must have been perturbed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from torchscout.experts.kernel.grouped_gemm import FAULT_WORDS, Perturbation
from torchscout.experts.kernel.work_items import Pass, WorkItem

if TYPE_CHECKING:
    from torchscout.experts.coverage import Rows
    from torchscout.experts.kernel.grouped_gemm import Projection

__all__ = ["Injected", "Qualification", "qualify"]

_COUNTED = tuple(role for role in WorkItem if role.value <= WorkItem.STEP_TAIL.value)
"""The paths that a perturbed work item can have; the remaining ones count the same tiles in another way."""


@dataclass(frozen=True, slots=True)
class Injected:
    """One perturbation of one pass on one shape."""

    rows: Rows
    which: Pass
    fault: Perturbation

    def __str__(self) -> str:
        place = "" if self.fault.step < 0 else f", step {self.fault.step}"
        return f"rows {self.rows}, {self.which.word}, tile {self.fault.tile}{place}"


@dataclass(slots=True)
class Qualification:
    """The results of all perturbations."""

    injected: int = 0
    fired: int = 0
    """Perturbations that the kernel applied exactly once."""
    changed: int = 0
    """Perturbations that fired and changed the result of the pass."""
    missed: Injected | None = None
    """The first perturbation that did not fire or changed nothing."""
    unaccounted: list[str] = field(default_factory=list)
    """Paths that were not perturbed as often as the kernel counted them."""

    @property
    def complete(self) -> bool:
        return self.injected == self.fired == self.changed and not self.unaccounted


def qualify(projection: Projection, shapes: Iterable[Rows], *, most: int | None = None) -> Qualification:
    """Perturb every tile and step of these shapes, or ``most`` of each pass, evenly distributed."""
    found = Qualification()
    for rows in shapes:
        for which in Pass:
            _qualify_pass(projection, rows, which, most, found)
    return found


def _qualify_pass(
    projection: Projection, rows: Rows, which: Pass, most: int | None, found: Qualification
) -> None:
    placed = projection.place(rows)
    counters = torch.zeros(2 * FAULT_WORDS, dtype=torch.int32, device=projection.device)
    projection.execute(which, placed, counters=counters)
    counted = counters.tolist()
    faults = _all_faults(projection, rows, which, counted)
    chosen = faults if most is None else faults[:: -(-len(faults) // most) or 1]
    witnesses, changed = _run(projection, rows, which, chosen)
    for fault, (_, _, fired, *_), differs in zip(chosen, witnesses, changed, strict=True):
        found.injected += 1
        found.fired += fired == 1
        found.changed += fired == 1 and differs
        if found.missed is None and not (fired == 1 and differs):
            found.missed = Injected(rows, which, fault)
    if len(chosen) == len(faults):
        found.unaccounted += _unaccounted(rows, which, witnesses, counted)


def _all_faults(projection: Projection, rows: Rows, which: Pass, counted: list[int]) -> list[Perturbation]:
    """Return a perturbation of every tile, and of every step of each."""
    tiles = counted[WorkItem.LAST_TILE.value] + counted[WorkItem.FOLLOWING_TILE.value]
    gemm, step = projection.gemm, projection.gemm.tilings[which].step
    faults = []
    for tile in range(tiles):
        length = {
            Pass.FORWARD: gemm.hidden,
            Pass.INPUT_GRADIENT: gemm.intermediate,
            Pass.WEIGHT_GRADIENT: rows[
                tile * len(rows) // tiles
            ],  # all experts have equally many tiles in this pass
        }[which]
        faults += [Perturbation(tile), *(Perturbation(tile, place) for place in range(-(-length // step)))]
    return faults


def _run(
    projection: Projection, rows: Rows, which: Pass, faults: list[Perturbation]
) -> tuple[list[list[int]], list[bool]]:
    """Return the words of each fault after its run, and whether the result differs; read back once."""
    placed = projection.place(rows)
    none = torch.full((FAULT_WORDS,), -1, dtype=torch.int32, device=projection.device)
    projection.execute(which, placed, fault=none)
    # As integers: equal NaNs must compare equal, and zeros of different signs must not.
    result = projection.result(which, rows).view(torch.int16)
    clean = result.clone()
    words = [[*fault, *(0,) * (FAULT_WORDS - len(fault))] for fault in faults]
    witnesses = (
        torch.tensor(words, dtype=torch.int32, device="cpu")
        .reshape(len(faults), FAULT_WORDS)
        .to(projection.device)
    )
    changed = torch.zeros(len(faults), dtype=torch.bool, device=projection.device)
    for place in range(len(faults)):
        projection.execute(which, placed, fault=witnesses[place])
        changed[place] = (result != clean).any()
    return witnesses.tolist(), changed.tolist()


def _unaccounted(rows: Rows, which: Pass, witnesses: list[list[int]], counted: list[int]) -> list[str]:
    """Return the paths that were not perturbed as often as the kernel counted them."""
    seen: Counter[int] = Counter()
    for _, step, fired, tile_role, step_role, *_ in witnesses:
        seen[tile_role if step < 0 else step_role] += fired
    expected = {role: counted[role.value] for role in _COUNTED}
    if which is not Pass.WEIGHT_GRADIENT:
        del expected[WorkItem.EMPTY]  # an expert without rows has no work item to perturb
    return [
        f"rows {rows}, {which.word}: {role.word} perturbed {seen[role.value]} times, counted {count} times"
        for role, count in expected.items()
        if seen[role.value] != count
    ]
