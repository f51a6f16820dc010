"""The cells on which pieces of the method are left out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from torchscout.cli.campaign.cell import Cell, Processes
from torchscout.cli.campaign.hanging import hang_cells
from torchscout.cli.campaign.layout import BLOCKS, LAYOUTS
from torchscout.cli.campaign.numerical import FAULTY, numerical_cells
from torchscout.cli.campaign.slow import SLOW, slow_layers
from torchscout.faults.plan import FaultPlan

__all__ = ["ablation_cells"]

_SDC = 24
_OF_LAYOUT = {"ddp": 4, "tensor": 3}
"""Slow ranks; twice as many are slow once."""
_HANGS = {
    ("late", "ddp-4"): 4,
    ("late", "fsdp2-4"): 4,
    ("late", "hybrid-8"): 6,
    ("frozen", "ddp-4"): 6,
    ("input", "ddp-4"): 4,
    ("other", "ddp-4"): 6,
}
_CLEAN_HANGS = 5


def ablation_cells(seed: int) -> list[Cell]:
    """The same for the same seed."""
    choose = random.Random(seed)
    wrong = [cell for cell in numerical_cells(seed) if (cell.row, cell.layout) == ("numerical-sdc", "ddp")]
    return [
        *_slow(choose, seed),
        *(replace(cell, row="sdc") for cell in choose.sample(wrong, _SDC)),
        *_nondeterministic(choose, seed),
        *(
            Cell("clean", f"clean-{number}", layout, seed=seed)
            for layout in _OF_LAYOUT
            for number in range(3)
        ),
        *_hanging(seed),
    ]


def _slow(choose: random.Random, seed: int) -> Iterator[Cell]:
    """Ranks that stay slow, and ranks that are slow in one step only."""
    for layout, count in _OF_LAYOUT.items():
        ranks = LAYOUTS[layout].ranks
        for rank in choose.sample(range(ranks), count):
            yield Cell("straggler", f"rank-{rank}", layout, faults=slow_layers(rank, SLOW), seed=seed)
        for rank in choose.sample(range(ranks), 2 * count):
            once = slow_layers(rank, range(FAULTY, FAULTY + 1))
            yield Cell("transient", f"rank-{rank}", layout, faults=once, benign=True, seed=seed)


def _nondeterministic(choose: random.Random, seed: int) -> Iterator[Cell]:
    """In the first replay one rank differs, in the second another one."""
    for number in range(4):
        block, faults = number % BLOCKS, FaultPlan()
        for call, rank in enumerate(choose.sample(range(LAYOUTS["ddp"].ranks), 2), start=1):
            at, calls = f"blocks.{block}/output", range(call, call + 1)
            faults = faults.flip_bit(rank=rank, at=at, step=FAULTY, bit=3, index=number, calls=calls)
        yield Cell(
            "nondeterminism", f"kernel-{number}", "ddp", faults=faults, benign=True, due=block, seed=seed
        )


def _hanging(seed: int) -> Iterator[Cell]:
    every = hang_cells(seed)
    for (kind, layout), count in _HANGS.items():
        yield from [cell for cell in every if (cell.name.split("-")[0], cell.layout) == (kind, layout)][
            :count
        ]
    for number in range(_CLEAN_HANGS):
        layout = ("ddp-4", "fsdp2-4", "hybrid-8")[number % 3]
        yield Cell("hang-clean", f"clean-{number}", layout, Processes.OBSERVED, seed=seed)
