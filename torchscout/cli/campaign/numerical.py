"""The matrix of wrong numbers: places x effects x layouts, 344 cells, and 30 without a fault (paper).

Forward outputs are wrong in replay, parameters after an update. A parameter that FSDP2 has only one copy of
leaves nothing to compare, so that there outputs alone are corrupted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.layout import LAYOUTS
from torchscout.faults.fault import FaultSite, SiteKind
from torchscout.faults.plan import FaultPlan

__all__ = ["FAULTY", "REPLAYED", "numerical_cells"]

REPLAYED = range(1, 200)
"""The passes over a place within a step that are not training's own."""
FAULTY = 2
"""A cell's step after its first, clean one."""

_OUTPUTS = ("blocks.0/output", "blocks.1/output", "blocks.2/output", "tokens/output", "head/output")
_PARAMETERS = (
    "blocks.0.attention.qkv/weight",
    "blocks.1.attention.out/weight",
    "blocks.2.norm/weight",
    "blocks.0.up/weight",
    "head/weight",
    "tokens/weight",
    "blocks.1.down/weight",
    "blocks.2.up/weight",
)
_LOW_BITS = range(4)
"""Of 23 bits of a mantissa: a change by less than a millionth of the value."""
_CLEAN = 10
"""Cells without a fault, of each layout."""
_ELEMENTS = 16
"""Every place has as many, also where it is sharded."""

_Plan = Callable[..., FaultPlan]


def _flip(*bits: int, every: int = 0) -> tuple[str, _Plan]:
    """Bits of one element, or of every n-th."""
    name = f"bit-{bits[0]}" if len(bits) == 1 else f"bits-{'-'.join(map(str, bits))}"
    return (
        f"{name}-every-{every}" if every else name,
        lambda **where: FaultPlan().flip_bits(bits=bits, every=every, **where),
    )


def _value(value: float) -> tuple[str, _Plan]:
    return f"value-{value:g}", lambda **where: FaultPlan().set_value(value=value, **where)


def _times(factor: float) -> tuple[str, _Plan]:
    def plan(*, index: int, **where: Any) -> FaultPlan:  # noqa: ARG001  it is about the whole tensor
        return FaultPlan().scale(factor=factor, **where)

    return f"times-{factor:g}", plan


def _noise(length: int) -> tuple[str, _Plan]:
    def plan(*, index: int, **where: Any) -> FaultPlan:
        first = index % (_ELEMENTS - length)
        return FaultPlan().overwrite(elements=range(first, first + length), seed=index, **where)

    return f"noise-{length}", plan


_EFFECTS = (
    _flip(22),
    _flip(4, 13),
    _flip(9, every=8),
    _flip(31),
    _value(1e4),
    _times(1.001),
    _noise(4),
    _flip(2, 7, 18),
    _flip(15),
    _flip(0, 1, 2, 3, 4, 5),
    _value(1.5),
    _times(-1.0),
)
"""From a millionth of the value to ten thousand times it, in one element, in several and in all. Of the bit
flips, those of a single bit are the smaller part, as in the field."""


def numerical_cells(seed: int) -> list[Cell]:
    """Every cell once, in the same order for the same seed."""
    choose = random.Random(seed)
    low = [_flip(bit) for bit in _LOW_BITS]
    matrix = (
        ("ddp", (*_OUTPUTS, *_PARAMETERS), _EFFECTS),
        ("ddp", (*_OUTPUTS, *_PARAMETERS[:5]), low),
        ("hsdp", (*_OUTPUTS, *_PARAMETERS[3:6]), _EFFECTS[:8]),
        ("hsdp", (*_OUTPUTS[:3], *_PARAMETERS[3:6]), low),
        ("fsdp2", _OUTPUTS, _EFFECTS),
    )
    faulty = [
        _cell(layout, at, effect, choose, seed)
        for layout, places, effects in matrix
        for effect in effects
        for at in places
    ]
    clean = [
        Cell("numerical-clean", f"clean-{number}", layout, seed=seed)
        for layout in ("ddp", "hsdp", "fsdp2")
        for number in range(_CLEAN)
    ]
    return list(_spread(faulty, clean))


def _cell(layout: str, at: str, effect: tuple[str, _Plan], choose: random.Random, seed: int) -> Cell:
    name, plan = effect
    place = FaultSite.read(at)
    is_computed = place.kind is SiteKind.PASS
    faults = plan(
        rank=choose.randrange(LAYOUTS[layout].ranks),
        at=at,
        step=FAULTY,
        index=choose.randrange(_ELEMENTS),
        **({"calls": REPLAYED} if is_computed else {}),
    )
    block = place.module.partition(".")[2] if is_computed and place.module.startswith("blocks.") else None
    return Cell(
        "numerical-sdc",
        f"{at}/{name}",
        layout,
        faults=faults,
        due=None if block is None else int(block),
        seed=seed,
    )


def _spread(faulty: Sequence[Cell], clean: Sequence[Cell]) -> Iterator[Cell]:
    """Cells without a fault between the others, in the order of layouts."""
    every = len(faulty) // len(clean)
    for number, cell in enumerate(faulty):
        yield cell
        if number % every == every - 1 and number // every < len(clean):
            yield clean[number // every]
