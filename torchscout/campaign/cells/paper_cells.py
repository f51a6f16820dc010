"""The cells of the paper's table: wrong numbers, hangs, slow ranks, corrupted checkpoints, experts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from torchscout.campaign.cells.cell import LAYOUTS, Cell, Processes
from torchscout.faults.effects import CHANGES
from torchscout.faults.fault import FaultSite, SiteKind, since
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import LayerKind
from torchscout.replay.schedule import Alike, PathOrder
from torchscout.testing.moe_model import LAYERS, experts_at
from torchscout.testing.transformer import TINY

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
    "slow_layers",
]

REPLAYED = range(1, 200)
"""The passes over a place within a step that belong to replay; pass 0 is training's."""
FAULTY = 2
"""The step of a cell's fault; the step before it is clean."""

_Plan = Callable[..., FaultPlan]
_OUTPUTS = ("layer.0/output", "layer.1/output", "layer.2/output", "embedding/output", "head/output")
_PARAMETERS = (
    "layer.0.attention.query/weight",
    "layer.1.attention.out/weight",
    "layer.2.mlp_norm/weight",
    "layer.0.up/weight",
    "head/weight",
    "embedding/weight",
    "layer.1.down/weight",
    "layer.2.up/weight",
)
_CLEAN = 10
"""Cells without a fault, of each layout."""
_ELEMENTS = 16
"""Every place has at least this many elements, also where it is sharded."""


def _flip(*bits: int, every: int = 0) -> tuple[str, _Plan]:
    name = f"bit{'s' * (len(bits) > 1)}-{'-'.join(map(str, bits))}" + (f"-every-{every}" if every else "")
    return name, partial(FaultPlan().flip_bits, bits=bits, every=every)


def _value(value: float) -> tuple[str, _Plan]:
    return f"value-{value:g}", partial(FaultPlan().set_value, value=value)


def _times(factor: float) -> tuple[str, _Plan]:
    def plan(*, index: int, **where: Any) -> FaultPlan:  # noqa: ARG001  the whole tensor is scaled
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
"""From a millionth of the value to ten thousand times it, in one element, in several and in all. As in the
field, flips of a single bit are the smaller part of bit flips."""
_LOW_BITS = tuple(_flip(bit) for bit in range(4))
"""Of a mantissa of 23 bits: a change by less than a millionth of the value."""
_NUMERICAL = (
    ("ddp", (*_OUTPUTS, *_PARAMETERS), _EFFECTS),
    ("ddp", (*_OUTPUTS, *_PARAMETERS[:5]), _LOW_BITS),
    ("hsdp", (*_OUTPUTS, *_PARAMETERS[3:6]), _EFFECTS[:8]),
    ("hsdp", (*_OUTPUTS[:3], *_PARAMETERS[3:6]), _LOW_BITS),
    ("fsdp2", _OUTPUTS, _EFFECTS),
)
"""Layouts, places and effects: every effect at every place."""


def numerical_cells(seed: int) -> list[Cell]:
    """Every cell once, in the same order for the same seed."""
    choose = random.Random(seed)
    faulty = [
        _numerical_cell(layout, at, effect, choose, seed)
        for layout, places, effects in _NUMERICAL
        for effect in effects
        for at in places
    ]
    clean = [
        Cell("numerical-clean", f"clean-{number}", layout, seed=seed)
        for layout in ("ddp", "hsdp", "fsdp2")
        for number in range(_CLEAN)
    ]
    return list(_interleaved(faulty, clean))


def _numerical_cell(
    layout: str, at: str, effect: tuple[str, _Plan], choose: random.Random, seed: int
) -> Cell:
    (name, plan), place = effect, FaultSite.read(at)
    rank, index = choose.randrange(LAYOUTS[layout].ranks), choose.randrange(_ELEMENTS)
    is_computed = place.kind is SiteKind.PASS
    calls = {"calls": REPLAYED} if is_computed else {}
    faults = plan(rank=rank, at=at, step=FAULTY, index=index, **calls)
    due = int(place.module[len("layer.") :]) if is_computed and place.module.startswith("layer.") else None
    return Cell("numerical-sdc", f"{at}/{name}", layout, faults=faults, due=due, seed=seed)


def _interleaved(faulty: Sequence[Cell], clean: Sequence[Cell]) -> Iterator[Cell]:
    """Spread cells without a fault evenly over the others, in the order of layouts."""
    every = len(faulty) // len(clean)
    for number, cell in enumerate(faulty):
        yield cell
        if number % every == every - 1 and number // every < len(clean):
            yield clean[number // every]


_HANG_STEP = 4
"""The steps before and after it are clean."""
_HANG_SECONDS = 8.0
"""How long a stall lasts if nobody notices it: much longer than observers take."""
_SPIN_SECONDS = 6.0
"""How long a kernel spins. It cannot be stopped once it is reported, and its cell waits for its end."""
_OF_EACH, _ON_DEVICE = 30, 8
_PLACES = (
    "step",
    *(f"layer.{layer}/{way}" for layer in range(TINY.layers) for way in ("forward", "backward")),
)
_DDP, _MIXED = ("ddp-4",), ("ddp-4", "fsdp2-4", "ddp-4", "fsdp2-4", "hybrid-8")
_STALL: dict[str, Any] = {"step": _HANG_STEP, "seconds": _HANG_SECONDS}
_OTHER = partial(FaultPlan().change_collective, at="all_reduce@default_pg", axis="replica", step=_HANG_STEP)

_HANGS: Mapping[str, tuple[Sequence[str], Sequence[Callable[[int, str], FaultPlan]]]] = {
    # Stopped by a signal; or one of its threads holds the interpreter lock.
    "frozen": (
        _DDP,
        [
            lambda rank, _: FaultPlan().freeze(rank=rank, **_STALL),
            lambda rank, _: FaultPlan().hold_interpreter(rank=rank, **_STALL),
        ],
    ),
    "late": (_MIXED, [lambda rank, at: FaultPlan().stall(rank=rank, at=at, **_STALL)]),
    "input": (_DDP, [lambda rank, _: FaultPlan().stall(rank=rank, at="input", **_STALL)]),
    "other": (_DDP, [lambda rank, _, what=what: _OTHER(rank=rank, what=what) for what in CHANGES]),  # type: ignore[misc]
    "clean": (_MIXED, [lambda *_: FaultPlan()]),
    "stuck": (
        _MIXED,
        [
            lambda rank, at: FaultPlan().stall(
                rank=rank, at=at, step=_HANG_STEP, seconds=_SPIN_SECONDS, on_device=True
            )
        ],
    ),
}
"""Kinds of hangs: their layouts and faults take turns. A fault is given a rank and a place of ``_PLACES``."""


def hang_cells(seed: int) -> list[Cell]:
    """120 cells with a fault, 30 of each kind, and 30 without."""
    faulty = _hang_cells("hang", ("frozen", "late", "input", "other"), _OF_EACH, seed)
    return [*faulty, *_hang_cells("hang-clean", ("clean",), _OF_EACH, seed)]


def device_hang_cells(seed: int) -> list[Cell]:
    """Only on CUDA: one rank's device is busy with a kernel somewhere in its step, and its host is not."""
    return _hang_cells("device-hang", ("stuck",), _ON_DEVICE, seed)


def _hang_cells(row: str, kinds: Sequence[str], count: int, seed: int) -> list[Cell]:
    choose, cells = random.Random(seed), list[Cell]()
    for kind in kinds:
        layouts, plans = _HANGS[kind]
        for number in range(count):
            layout = layouts[number % len(layouts)]
            at, rank = choose.choice(_PLACES), choose.randrange(LAYOUTS[layout].ranks)
            faults = plans[number % len(plans)](rank, at)
            cells.append(Cell(row, f"{kind}-{number}", layout, Processes.OBSERVED, faults, seed=seed))
    return cells


SLOW = range(6, 10)
"""Two rounds are enough for an incident, unless the machine is noisy: the rounds before them are clean, and
replay learns from them how noisy it is."""
_SLOW_SECONDS = 0.25


def slow_layers(rank: int, steps: range) -> FaultPlan:
    """Delay every layer, whichever is replayed."""
    faults = FaultPlan()
    for layer in range(TINY.layers):
        at = f"layer.{layer}/forward"
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


def recovery_cells(seed: int) -> list[Cell]:
    """Persistent faults of rank 9 after two accepted checks, each in a layout that has such a place."""
    where: dict[str, Any] = {"rank": 9, "step": since(3)}
    # The head is replayed after every step; a faulty chip does not wait for its turn either.
    faults = {
        ("parameter", "ddp"): FaultPlan().flip_bit(at="layer.1.up/weight", bit=12, **where),
        ("replay-output", "fsdp2"): FaultPlan().flip_bit(at="head/output", bit=12, calls=REPLAYED, **where),
        ("gradient-shard", "hsdp"): FaultPlan().scale(at="layer.1.up/weight.grad", factor=-3.0, **where),
    }
    return [
        Cell("dense-sdc", name, layout, Processes.RECOVERY, each, seed=seed)
        for (name, layout), each in faults.items()
    ]


SHAPES = (128, 512)
"""Rows of each expert, the catalog's shapes."""
KERNEL_SHAPES = (4, 16)
"""The same where Triton interprets the kernel: a part of a tile, and a whole one."""
WORK = "work-items"
"""The name of cells that perturb every work item."""


class Turns:
    """The order in which checks replay the experts: one shape after another, each time on another layer."""

    def __init__(self, shapes: tuple[int, ...], layers: int) -> None:
        self._order = PathOrder([Alike(layers, len(shapes))])
        self._pairs = [(rows, layer) for rows in shapes for layer in range(layers)]

    def __len__(self) -> int:
        """The checks in a cycle."""
        return self._order.cycle

    def second(self, rows: int, layer: int = 0) -> int:
        """The step of its first turn after the first cycle, with one check after each step."""
        return next(step for step in count(len(self) + 1) if self._at(step) == (rows, layer))

    def target(self, step: int) -> str:
        """What is replayed after this step, as records name it."""
        rows, layer = self._at(step)
        return f"{experts_at(layer)} x{rows}"

    def _at(self, step: int) -> tuple[int, int]:
        (target,) = self._order.targets(step - 1, step - 1, 1)
        return self._pairs[target]


def routed_cells(seed: int) -> list[Cell]:
    """Two cells with wrong weights, one without a fault, and four of the kernel."""
    at, turns = experts_at(0), Turns(SHAPES, LAYERS)
    sick_step = since(Turns(KERNEL_SHAPES, 1).second(KERNEL_SHAPES[0]))
    table: list[tuple[str, str, str, Processes, FaultPlan]] = [
        ("moe-clean", "clean", "ep4", Processes.ROUTED, FaultPlan()),
        *(("moe-kernel", f"{WORK}-{way}", "alone", Processes.KERNEL, FaultPlan()) for way in ("up", "down")),
    ]
    for rows in SHAPES:
        weight = FaultPlan().flip_bit(rank=15, at=f"{at}/up", step=turns.second(rows), bit=12)
        weight = weight.showing(f"{at}/parameters", role=LayerKind.EXPERT)
        table.append(("moe-sdc", f"rows-{rows}", "ep4", Processes.ROUTED, weight))
    for layout, rank in (("ep2", 7), ("ep4", 15)):
        kernel = FaultPlan().perturb_kernel(rank=rank, at=f"{at}/forward", step=sick_step)
        faults = kernel.showing(role=LayerKind.EXPERT)
        table.append(("moe-kernel", "persistent", layout, Processes.KERNEL, faults))
    return [Cell(*each, seed=seed) for each in table]


def paper_cells(seed: int) -> list[Cell]:
    """All cells of the paper's table; the same for the same seed."""
    kinds = (recovery_cells, numerical_cells, slow_cells, routed_cells, hang_cells)
    return [cell for cells in kinds for cell in cells(seed)]
