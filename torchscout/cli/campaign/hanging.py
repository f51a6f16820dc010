"""Cells of jobs that stop: one rank late, stopped, without input, or in another collective (paper, 7)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from torchscout.cli.campaign.cell import Cell, Processes
from torchscout.cli.campaign.layout import BLOCKS, LAYOUTS
from torchscout.faults.effects import CHANGES
from torchscout.faults.plan import FaultPlan

__all__ = ["device_hang_cells", "hang_cells"]

_FAULTY = 4
"""The steps before it are clean, and those after it."""
_SECONDS = 8.0
"""What a stall lasts if nobody notices it, far beyond what observers take."""
_PLACES = ("step", *(f"blocks.{block}/{way}" for block in range(BLOCKS) for way in ("forward", "backward")))
_OF_EACH = 30
_ON_DEVICE = 8
_SPIN_SECONDS = 6.0
"""What a kernel spins. It cannot be stopped once it is reported, and its cell waits for its end."""


def hang_cells(seed: int) -> list[Cell]:
    """120 with a fault, 30 of each kind, and 30 without."""
    choose = random.Random(seed)
    return [
        *_frozen(choose, seed),
        *_late(choose, seed),
        *_input(choose, seed),
        *_other(choose, seed),
        *_clean(seed),
    ]


def device_hang_cells(seed: int) -> list[Cell]:
    """Only on CUDA: one rank's device is busy with a kernel, somewhere in its step, and its host is not."""
    choose = random.Random(seed)
    cells = []
    for number in range(_ON_DEVICE):
        layout = _layout(number)
        at, rank = choose.choice(_PLACES), choose.randrange(LAYOUTS[layout].ranks)
        faults = FaultPlan().stall(rank=rank, at=at, step=_FAULTY, seconds=_SPIN_SECONDS, on_device=True)
        cells.append(Cell("device-hang", f"stuck-{number}", layout, Processes.OBSERVED, faults, seed=seed))
    return cells


def _late(choose: random.Random, seed: int) -> Iterator[Cell]:
    """A rank sleeps somewhere in its step, in three layouts."""
    for number in range(_OF_EACH):
        layout = _layout(number)
        at, rank = choose.choice(_PLACES), choose.randrange(LAYOUTS[layout].ranks)
        faults = FaultPlan().stall(rank=rank, at=at, step=_FAULTY, seconds=_SECONDS)
        yield _cell(f"late-{number}", layout, faults, seed)


def _frozen(choose: random.Random, seed: int) -> Iterator[Cell]:
    """A process is stopped by a signal, or one of its threads keeps the interpreter to itself."""
    for number in range(_OF_EACH):
        rank = choose.randrange(LAYOUTS["ddp-4"].ranks)
        plan = (FaultPlan().freeze, FaultPlan().hold_interpreter)[number % 2]
        yield _cell(f"frozen-{number}", "ddp-4", plan(rank=rank, step=_FAULTY, seconds=_SECONDS), seed)


def _input(choose: random.Random, seed: int) -> Iterator[Cell]:
    for number in range(_OF_EACH):
        rank = choose.randrange(LAYOUTS["ddp-4"].ranks)
        faults = FaultPlan().stall(rank=rank, at="input", step=_FAULTY, seconds=_SECONDS)
        yield _cell(f"input-{number}", "ddp-4", faults, seed)


def _other(choose: random.Random, seed: int) -> Iterator[Cell]:
    """A rank issues a collective of another type, shape or operation."""
    for number in range(_OF_EACH):
        rank, what = choose.randrange(LAYOUTS["ddp-4"].ranks), choose.choice(CHANGES)
        faults = FaultPlan().change_collective(
            rank=rank, at="all_reduce@default_pg", axis="replica", step=_FAULTY, what=what
        )
        yield _cell(f"other-{what}-{number}", "ddp-4", faults, seed)


def _clean(seed: int) -> Iterator[Cell]:
    for number in range(_OF_EACH):
        yield Cell("hang-clean", f"clean-{number}", _layout(number), Processes.OBSERVED, seed=seed)


def _layout(number: int) -> str:
    return ("ddp-4", "fsdp2-4", "ddp-4", "fsdp2-4", "hybrid-8")[number % 5]


def _cell(name: str, layout: str, faults: FaultPlan, seed: int) -> Cell:
    return Cell("hang", name, layout, Processes.OBSERVED, faults, seed=seed)
