"""The plan of faults: plain data that travels to every rank and knows its ground truth.

``check`` refuses a plan that cannot be carried out, or that no detector could see, before anything starts.
Each refusal names the fault and what there is instead. What a model looks like on other ranks, as in a
pipeline, is not known here: there each rank checks its own faults, ``faults.of(rank)``.

``realistic`` draws wrong numbers as they are seen in the field. By published measurements (arXiv
2605.04213) NaN or infinity is only about 1% of the outcomes of silent data corruption, and single-bit
flips are under 40% of bit-flip events: most corruptions are finite numbers, and hit several bits.
``SHARES`` follows both figures; how the rest is divided is our choice.
"""

from __future__ import annotations

import difflib
import math
import random
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchscout.collectives.call import POINT_TO_POINT, operators
from torchscout.decision.record import Manifestation, Scope
from torchscout.faults.effects import (
    CallEffect,
    Change,
    DeviceSpin,
    FlipBit,
    FlipBits,
    Freeze,
    HoldInterpreter,
    Overwrite,
    PerturbKernel,
    Scale,
    SetValue,
    Signal,
    Skip,
    Sleep,
    StayInside,
    StuckBit,
    Swap,
    TensorEffect,
)
from torchscout.faults.fault import FIRST, Effect, Fault, FaultSite, Shown, SiteKind, Steps, steps_of
from torchscout.faults.ground_truth import GroundTruth, peers_of, surface_of, truths
from torchscout.mesh import LayerKind, Mesh

if TYPE_CHECKING:
    from torchscout.faults.fault import Fault

__all__ = [
    "FIRST",
    "SHARES",
    "Fault",
    "FaultPlan",
    "GroundTruth",
    "check",
    "module_at",
    "realistic",
    "tensor_at",
]

_SDC, _STRAGGLER, _HANG = Manifestation.SDC, Manifestation.STRAGGLER, Manifestation.HANG


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """A plan of faults, built link by link; plain data that travels to every rank.

    ``Faults().flip_bit(rank=5, at="layer.2/weight", step=7, bit=30).delay(rank=1, ...)``

    ``at`` is a place as ``Fault.at`` describes them. ``step`` is one step, a ``range`` of them,
    ``since(step)`` for ever, or ``Recurring`` by chance. ``calls`` says which passes over the place within a
    step are hit, all of them with None: the first is training's own. ``Injector`` carries the plan out.
    """

    planned: tuple[Fault, ...] = ()

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.planned)

    def __len__(self) -> int:
        return len(self.planned)

    def __add__(self, other: FaultPlan) -> FaultPlan:
        return FaultPlan(self.planned + other.planned)

    def of(self, rank: int) -> FaultPlan:
        """One rank's share."""
        return FaultPlan(tuple(fault for fault in self.planned if fault.rank == rank))

    def truth(self, mesh: Mesh) -> tuple[GroundTruth, ...]:
        """What a perfect detector says of all of them; one finding may be of several faults."""
        return truths(self.planned, mesh)

    def check(self, mesh: Mesh | int, model: nn.Module) -> None:
        """Refuse what cannot happen or cannot be seen in this job, before anything starts.

        ``mesh`` may be the number of ranks alone; what is visible to whom is then not looked at.
        """
        check(self.planned, mesh, model)

    def showing(
        self,
        surface: str | None = None,
        *,
        scope: Scope | None = None,
        ranks: tuple[int, ...] | None = None,
        role: LayerKind | None = None,
    ) -> FaultPlan:
        """What is known of the last fault's finding: a part of a layer shows in the layer's output."""
        *before, last = self.planned
        return FaultPlan((*before, replace(last, shown=Shown(surface, scope, ranks, role))))

    def flip_bit(
        self, *, rank: int, at: str, step: Steps, bit: int, index: int = 0, calls: range | None = FIRST
    ) -> FaultPlan:
        """Flip one bit of one element; bit 0 is the least significant."""
        return self._add(rank, at, step, FlipBit(bit, index), _SDC, calls)

    def flip_bits(
        self,
        *,
        rank: int,
        at: str,
        step: Steps,
        bits: Sequence[int],
        index: int = 0,
        every: int = 0,
        calls: range | None = FIRST,
    ) -> FaultPlan:
        """Flip several bits of one element, or of every n-th element from there on."""
        return self._add(rank, at, step, FlipBits(tuple(bits), index, every), _SDC, calls)

    def stick_bit(
        self,
        *,
        rank: int,
        at: str,
        step: Steps,
        bit: int,
        value: int,
        index: int = 0,
        calls: range | None = None,
    ) -> FaultPlan:
        """A bit of one element can only be ``value``, 0 or 1, whenever the place is passed."""
        return self._add(rank, at, step, StuckBit(bit, value, index), _SDC, calls)

    def set_value(
        self, *, rank: int, at: str, step: Steps, value: float, index: int = 0, calls: range | None = FIRST
    ) -> FaultPlan:
        return self._add(rank, at, step, SetValue(value, index), _SDC, calls)

    def scale(
        self, *, rank: int, at: str, step: Steps, factor: float, calls: range | None = FIRST
    ) -> FaultPlan:
        """Multiply a whole tensor."""
        return self._add(rank, at, step, Scale(factor), _SDC, calls)

    def overwrite(
        self,
        *,
        rank: int,
        at: str,
        step: Steps,
        elements: range,
        seed: int = 0,
        value: float | None = None,
        calls: range | None = FIRST,
    ) -> FaultPlan:
        """Neighbouring elements become noise drawn from a seed, or all one value."""
        effect = Overwrite(elements.start, len(elements), seed, value)
        return self._add(rank, at, step, effect, _SDC, calls)

    def perturb_kernel(
        self, *, rank: int, at: str, step: Steps, tile: int = 0, within: int = -1
    ) -> FaultPlan:
        """Experts on a ``FaultyGemm`` compute a tile, or a step ``within`` it, wrong from then on."""
        return self._add(rank, at, step, PerturbKernel(tile, within), _SDC, None)

    def delay(
        self,
        *,
        rank: int,
        at: str,
        step: Steps,
        seconds: float,
        calls: range | None = FIRST,
        on_device: bool = False,
    ) -> FaultPlan:
        """Be slow, and go on: a straggler. Modules, fetching batches, reading and writing checkpoints.

        The host sleeps; ``on_device`` a kernel keeps the current CUDA stream busy instead.
        """
        effect = DeviceSpin(seconds) if on_device else Sleep(seconds)
        return self._add(rank, at, step, effect, _STRAGGLER, calls)

    def slow_collective(
        self, *, ranks: Sequence[int], at: str, axis: str, step: Steps, seconds: float
    ) -> FaultPlan:
        """These members are late at every such collective of a process group that lies along ``axis``."""
        return self._add_each(ranks, at, axis, step, Sleep(seconds), _STRAGGLER, None)

    def stall(self, *, rank: int, at: str, step: Steps, seconds: float, on_device: bool = False) -> FaultPlan:
        """Stop for so long that the job hangs: the host, or ``on_device`` the current CUDA stream."""
        return self._add(rank, at, step, DeviceSpin(seconds) if on_device else Sleep(seconds), _HANG)

    def freeze(self, *, rank: int, step: Steps, seconds: float, at: str = "step") -> FaultPlan:
        """Stop the process by a signal, for so long that the job hangs."""
        return self._add(rank, at, step, Freeze(seconds), _HANG)

    def hold_interpreter(self, *, rank: int, step: Steps, seconds: float, at: str = "step") -> FaultPlan:
        """No thread of the process runs Python, for so long that the job hangs."""
        return self._add(rank, at, step, HoldInterpreter(seconds), _HANG)

    def kill(self, *, rank: int, step: Steps, at: str = "step") -> FaultPlan:
        return self.signal(rank=rank, step=step, number=signal.SIGKILL, at=at)

    def signal(self, *, rank: int, step: Steps, number: signal.Signals, at: str = "step") -> FaultPlan:
        """Send this process a signal: SIGKILL, SIGSTOP, ..."""
        return self._add(rank, at, step, Signal(number), _HANG)

    def change_collective(
        self, *, rank: int, at: str, axis: str, step: Steps, what: str, calls: range | None = FIRST
    ) -> FaultPlan:
        """Issue a collective of another ``dtype``, ``operation`` or ``shape`` than the other members do."""
        return self._add_each([rank], at, axis, step, Change(what), _HANG, calls)

    def skip_collective(
        self, *, rank: int, at: str, axis: str, step: Steps, calls: range | None = FIRST
    ) -> FaultPlan:
        """Go on without a collective that the other members enter."""
        return self._add_each([rank], at, axis, step, Skip(), _HANG, calls)

    def swap_collectives(
        self, *, rank: int, at: str, axis: str, step: Steps, calls: range | None = FIRST
    ) -> FaultPlan:
        """Enter the next collective, on whatever group, before this one."""
        return self._add_each([rank], at, axis, step, Swap(), _HANG, calls)

    def stick_collective(
        self, *, ranks: Sequence[int], at: str, axis: str, step: Steps, seconds: float
    ) -> FaultPlan:
        """All of these members enter a collective, and none comes out again for a while."""
        return self._add_each(ranks, at, axis, step, StayInside(seconds), _HANG, FIRST)

    def _add_each(
        self,
        ranks: Sequence[int],
        at: str,
        axis: str,
        step: Steps,
        effect: CallEffect | Sleep,
        manifestation: Manifestation,
        calls: range | None,
    ) -> FaultPlan:
        when = steps_of(step)
        added = [Fault(rank, at, when, effect, manifestation, calls, axis) for rank in ranks]
        return FaultPlan((*self.planned, *added))

    def _add(
        self,
        rank: int,
        at: str,
        step: Steps,
        effect: Effect,
        manifestation: Manifestation,
        calls: range | None = FIRST,
    ) -> FaultPlan:
        return FaultPlan((*self.planned, Fault(rank, at, steps_of(step), effect, manifestation, calls)))


_MOMENTS = ("forward", "backward")
_TIMED = (SiteKind.PASS, SiteKind.PHASE, SiteKind.COLLECTIVE)
_HANGS = ("issued/", "fingerprint/", "digest/", "splits/", "deadlock", "process")
_Named = TypeVar("_Named")


def check(faults: Iterable[Fault], mesh: Mesh | int, model: nn.Module) -> None:
    """A ``ValueError`` for the first fault that is impossible in a job like this."""
    size = mesh if isinstance(mesh, int) else len(mesh)
    for fault in faults:
        if fault.rank >= size:
            raise ValueError(f"{_said(fault)}: the job has ranks 0 to {size - 1}")
        _check_effect(fault)
        _check_place(fault, model)
        _check_surface(fault)
        if isinstance(mesh, Mesh):
            _check_visibility(fault, mesh)


def module_at(place: FaultSite, model: nn.Module) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    return _named(place.module, modules, "module")


def tensor_at(place: FaultSite, model: nn.Module) -> torch.Tensor:
    """The parameter, or the buffer."""
    known: dict[str, torch.Tensor] = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return _named(place.tensor, known, "parameter")


def _check_effect(fault: Fault) -> None:
    """Whether such a thing can happen at such a place."""
    kind, name = fault.place.kind, fault.place.name
    if isinstance(fault.effect, TensorEffect):
        if kind in (SiteKind.STEP, SiteKind.PHASE) or (kind is SiteKind.PASS and name in _MOMENTS):
            raise ValueError(f"{_said(fault)}: there is no tensor at a moment; say which of its tensors")
        if kind is SiteKind.COLLECTIVE and name in POINT_TO_POINT:
            # Gloo's receives can be waited for once, and their caller does so.
            raise ValueError(f"{_said(fault)}: what one rank sends another cannot be made wrong")
    elif isinstance(fault.effect, CallEffect | StayInside):
        if kind is not SiteKind.COLLECTIVE:
            raise ValueError(f"{_said(fault)}: this happens to a collective, such as all_reduce@GROUP")
    elif fault.manifestation is Manifestation.STRAGGLER and kind not in _TIMED:
        raise ValueError(
            f"{_said(fault)}: shows on no surface, since nothing times that place by itself; "
            "delay MODULE/forward, MODULE/backward, a collective, input or checkpoint_write"
        )


def _check_place(fault: Fault, model: nn.Module) -> None:
    """Whether the model has it, and the effect fits what is there."""
    place = fault.place
    if place.kind is SiteKind.COLLECTIVE:
        known = {operator.operation: None for operator in operators()}
        _named(place.name, known, "collective", owner="PyTorch")
    elif place.kind is SiteKind.PASS:
        module_at(place, model)
    elif place.kind in (SiteKind.GRADIENT, SiteKind.STATE):
        tensor = tensor_at(place, model)
        has_its_shape = place.slot in ("", "grad", "gradient")
        is_here = not isinstance(tensor, DTensor) and not tensor.is_meta
        if has_its_shape and is_here and isinstance(fault.effect, TensorEffect):
            try:
                fault.effect.corrupt(tensor.detach().clone())
            except ValueError as error:
                raise ValueError(f"{_said(fault)}: {error}") from error


def _check_surface(fault: Fault) -> None:
    """Whether what the plan expects is what a detector of this kind of failure reports."""
    surfaces = fault.shown.surface.split("|") if fault.shown.surface is not None else []
    for surface in surfaces:
        fits = {
            Manifestation.STRAGGLER: surface.startswith("time/"),
            Manifestation.HANG: surface.startswith(_HANGS),
            Manifestation.SDC: "/" in surface and not surface.startswith(("time/", *_HANGS)),
        }[fault.manifestation]
        if not fits:
            raise ValueError(f"{_said(fault)}: no {fault.manifestation.value} shows on {surface!r}")


def _check_visibility(fault: Fault, mesh: Mesh) -> None:
    surface_of(fault, mesh)
    is_causal = fault.manifestation is Manifestation.HANG or fault.place.kind is SiteKind.COLLECTIVE
    if not is_causal and not peers_of(fault, mesh).can_compare:
        raise ValueError(f"{_said(fault)}: rank {fault.rank} has no peer to be compared with in this mesh")
    is_computed = fault.manifestation is Manifestation.SDC and fault.place.kind in (
        SiteKind.PASS,
        SiteKind.GRADIENT,
    )
    if is_computed and fault.calls == FIRST:
        raise ValueError(
            f"{_said(fault)}: hits training's own pass alone, and nothing is left that replicas disagree "
            "about; calls=range(1, 200) are those of replay, None are all"
        )


def _said(fault: Fault) -> str:
    return f"{fault.effect} on rank {fault.rank} at {fault.at!r}"


def _named(name: str, known: Mapping[str, _Named], kind: str, owner: str = "the model") -> _Named:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or sorted(known)[:3]
        raise ValueError(f"{owner} has no {kind} {name!r}; there is {', '.join(map(repr, near))}")
    return known[name]


SHARES: Mapping[str, float] = {
    "one bit": 0.25,
    "several bits": 0.30,
    "periodic addresses": 0.14,
    "stuck bit": 0.08,
    "range": 0.12,
    "value": 0.10,
    "not finite": 0.01,
}
"""How often each kind is drawn, relative to the others. Of the first three, the bit flips, one in three is of
a single bit."""


def realistic(
    seed: int,
    *,
    steps: Sequence[int],
    ranks: Sequence[int],
    places: Mapping[str, int],
    width: int = 32,
    calls: range | None = FIRST,
) -> FaultPlan:
    """One wrong number in each of ``steps``: on one of ``ranks``, at one of ``places``.

    ``places`` has the number of elements at each; ``width`` is that of an element, in bits. The same seed
    gives the same plan on every rank and in every run.
    """
    if not (steps and ranks and places):
        raise ValueError("a realistic plan needs steps, ranks and places to draw from")
    if empty := [at for at, elements in places.items() if elements < 1]:
        raise ValueError(f"there is no element at {empty[0]!r}")
    chance, faults = random.Random(seed), FaultPlan()
    for step in steps:
        at = chance.choice(list(places))
        hit = {"rank": chance.choice(list(ranks)), "at": at, "step": step, "calls": calls}
        faults = _drawn(chance, faults, hit, places[at], width)
    return faults


def _drawn(
    chance: random.Random, faults: FaultPlan, hit: dict[str, Any], elements: int, width: int
) -> FaultPlan:
    (kind,) = chance.choices(list(SHARES), list(SHARES.values()))
    index, bit = chance.randrange(elements), chance.randrange(width)
    several = chance.sample(range(width), chance.randint(2, min(8, width)))
    if kind == "one bit":
        return faults.flip_bit(**hit, index=index, bit=bit)
    if kind == "several bits":
        return faults.flip_bits(**hit, index=index, bits=several)
    if kind == "periodic addresses":
        every = 2 ** chance.randint(1, max(1, elements.bit_length() - 2))
        return faults.flip_bits(**hit, index=chance.randrange(min(every, elements)), every=every, bits=[bit])
    if kind == "stuck bit":
        return faults.stick_bit(**hit, index=index, bit=bit, value=chance.randrange(2))
    if kind == "range":
        length = chance.randint(1, elements - index)
        return faults.overwrite(**hit, elements=range(index, index + length), seed=chance.getrandbits(32))
    wrong = chance.choice([math.nan, math.inf, -math.inf]) if kind == "not finite" else chance.gauss(0, 10)
    return faults.set_value(**hit, index=index, value=wrong)
