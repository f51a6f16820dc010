"""The cells of the paper's table: wrong numbers, hangs, slow ranks, corrupted checkpoints, experts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchscout.campaign.cell import BLOCKS, LAYOUTS, Cell, Processes
from torchscout.faults.effects import CHANGES
from torchscout.faults.fault import FaultSite, SiteKind, since
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import LayerKind
from torchscout.testing.moe_model import LAYERS, experts_at

__all__ = [
    "FAULTY",
    "KERNEL_SHAPES",
    "REPLAYED",
    "SHAPES",
    "SLOW",
    "WORK",
    "Turns",
    "device_hang_cells",
    "hang_cells",
    "numerical_cells",
    "paper_cells",
    "recovery_cells",
    "routed_cells",
    "slow_cells",
    "slow_layers",
]

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
        _numerical_cell(layout, at, effect, choose, seed)
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


def _numerical_cell(
    layout: str, at: str, effect: tuple[str, _Plan], choose: random.Random, seed: int
) -> Cell:
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
        yield _hang_cell(f"late-{number}", layout, faults, seed)


def _frozen(choose: random.Random, seed: int) -> Iterator[Cell]:
    """A process is stopped by a signal, or one of its threads keeps the interpreter to itself."""
    for number in range(_OF_EACH):
        rank = choose.randrange(LAYOUTS["ddp-4"].ranks)
        plan = (FaultPlan().freeze, FaultPlan().hold_interpreter)[number % 2]
        yield _hang_cell(f"frozen-{number}", "ddp-4", plan(rank=rank, step=_FAULTY, seconds=_SECONDS), seed)


def _input(choose: random.Random, seed: int) -> Iterator[Cell]:
    for number in range(_OF_EACH):
        rank = choose.randrange(LAYOUTS["ddp-4"].ranks)
        faults = FaultPlan().stall(rank=rank, at="input", step=_FAULTY, seconds=_SECONDS)
        yield _hang_cell(f"input-{number}", "ddp-4", faults, seed)


def _other(choose: random.Random, seed: int) -> Iterator[Cell]:
    """A rank issues a collective of another type, shape or operation."""
    for number in range(_OF_EACH):
        rank, what = choose.randrange(LAYOUTS["ddp-4"].ranks), choose.choice(CHANGES)
        faults = FaultPlan().change_collective(
            rank=rank, at="all_reduce@default_pg", axis="replica", step=_FAULTY, what=what
        )
        yield _hang_cell(f"other-{what}-{number}", "ddp-4", faults, seed)


def _clean(seed: int) -> Iterator[Cell]:
    for number in range(_OF_EACH):
        yield Cell("hang-clean", f"clean-{number}", _layout(number), Processes.OBSERVED, seed=seed)


def _layout(number: int) -> str:
    return ("ddp-4", "fsdp2-4", "ddp-4", "fsdp2-4", "hybrid-8")[number % 5]


def _hang_cell(name: str, layout: str, faults: FaultPlan, seed: int) -> Cell:
    return Cell("hang", name, layout, Processes.OBSERVED, faults, seed=seed)


SLOW = range(6, 10)
"""Two rounds are enough for an incident, unless the machine is noisy. Before them there are clean ones, from
which replay learns how noisy it is."""
_SLOW_SECONDS = 0.25


def slow_layers(rank: int, steps: range) -> FaultPlan:
    """Whichever layer is replayed."""
    faults = FaultPlan()
    for block in range(BLOCKS):
        at = f"blocks.{block}/forward"
        faults = faults.delay(rank=rank, at=at, step=steps, seconds=_SLOW_SECONDS, calls=None)
    return faults


def slow_cells(seed: int) -> list[Cell]:
    ranks = [
        Cell("compute-straggler", "rank-9", layout, faults=slow_layers(9, SLOW), seed=seed)
        for layout in ("ddp", "hsdp", "fsdp2")
    ]
    link = FaultPlan().slow_collective(
        ranks=(15,), at="all_reduce@mesh_tensor", axis="tensor", step=SLOW, seconds=_SLOW_SECONDS
    )
    return [*ranks, Cell("communication-straggler", "rank-15", "tensor", faults=link, seed=seed)]


_CORRUPTED = 3
"""After two accepted checks."""


def recovery_cells(seed: int) -> list[Cell]:
    """Rank 9's, each where its layout has something of the kind."""
    parameter = FaultPlan().flip_bit(rank=9, at="blocks.1.up/weight", step=since(_CORRUPTED), bit=12)
    # Whichever layer is replayed: a sick chip does not wait for its turn.
    output = FaultPlan().flip_bit(rank=9, at="head/output", step=since(_CORRUPTED), bit=12, calls=REPLAYED)
    gradient = FaultPlan().scale(rank=9, at="blocks.1.up/weight.grad", step=since(_CORRUPTED), factor=-3.0)
    return [
        Cell("dense-sdc", name, layout, Processes.RECOVERY, faults, seed=seed)
        for name, layout, faults in (
            ("parameter", "ddp", parameter),
            ("replay-output", "fsdp2", output),
            ("gradient-shard", "hsdp", gradient),
        )
    ]


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


def paper_cells(seed: int) -> list[Cell]:
    """All of them; the same for the same seed."""
    return [
        *recovery_cells(seed),
        *numerical_cells(seed),
        *slow_cells(seed),
        *routed_cells(seed),
        *hang_cells(seed),
    ]
