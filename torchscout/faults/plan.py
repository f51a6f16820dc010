"""The plan of faults, its checks, and random plans.

``check`` refuses a plan that cannot be carried out, or that no detector could see, before anything starts. It
does not know the models of other ranks, as in a pipeline: there each rank checks ``faults.of(rank)``.

``realistic`` draws corruptions as they occur in the field. By published measurements (arXiv 2605.04213) NaN
or infinity is only about 1% of silent data corruptions, and flips of a single bit are under 40% of bit flips:
most corruptions are finite, and hit several bits. ``SHARES`` follows both figures; the rest is our choice.
"""

from __future__ import annotations

import difflib
import math
import random
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchscout.collectives.call import POINT_TO_POINT, operators
from torchscout.decision.types import Manifestation, Scope
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

_SDC, _STRAGGLER = Manifestation.SDC, Manifestation.STRAGGLER
_HANG, _CRASH = Manifestation.HANG, Manifestation.CRASH


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """A plan of faults, built by chaining calls; plain data that is sent to every rank.

    ``FaultPlan().flip_bit(rank=5, at="layer.2/weight", step=7, bit=30).delay(rank=1, ...)``

    ``at`` is a site, as ``Fault.at`` describes. ``step`` is one step, a ``range``, ``since(step)`` for a
    persistent fault, or ``Recurring`` for a random one. ``calls`` are the passes over the site within a step
    that are hit, None for all; the first one is training's. ``Injector`` carries the plan out.
    """

    planned: tuple[Fault, ...] = ()

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.planned)

    def __len__(self) -> int:
        return len(self.planned)

    def __add__(self, other: FaultPlan) -> FaultPlan:
        return FaultPlan(self.planned + other.planned)

    def of(self, rank: int) -> FaultPlan:
        """The faults of one rank."""
        return FaultPlan(tuple(fault for fault in self.planned if fault.rank == rank))

    def truth(self, mesh: Mesh) -> tuple[GroundTruth, ...]:
        """What a perfect detector reports; several faults may make one finding."""
        return truths(self.planned, mesh)

    def check(self, mesh: Mesh | int, model: nn.Module) -> None:
        """Raise ``ValueError`` for a fault that cannot happen, or cannot be detected, in this job.

        ``mesh`` may be the number of ranks; detectability is not checked then.
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
        """Set what the last fault's finding shows, such as the layer's output for a part of a layer."""
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
        """Set a bit of one element to ``value``, 0 or 1, at every pass over the site."""
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
        """Overwrite adjacent elements with noise drawn from a seed, or with one value."""
        effect = Overwrite(elements.start, len(elements), seed, value)
        return self._add(rank, at, step, effect, _SDC, calls)

    def perturb_kernel(
        self, *, rank: int, at: str, step: Steps, tile: int = 0, within: int = -1
    ) -> FaultPlan:
        """Let experts on a ``FaultyGemm`` compute a tile, or a step ``within`` it, wrong from then on."""
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
        """Delay a module, fetching a batch, or reading or writing a checkpoint: a straggler.

        The host sleeps; with ``on_device`` a kernel keeps the current CUDA stream busy instead.
        """
        effect = DeviceSpin(seconds) if on_device else Sleep(seconds)
        return self._add(rank, at, step, effect, _STRAGGLER, calls)

    def slow_collective(
        self, *, ranks: Sequence[int], at: str, axis: str, step: Steps, seconds: float
    ) -> FaultPlan:
        """Delay these ranks at every such collective of a process group along the mesh axis ``axis``."""
        return self._add(ranks, at, step, Sleep(seconds), _STRAGGLER, None, axis)

    def stall(self, *, rank: int, at: str, step: Steps, seconds: float, on_device: bool = False) -> FaultPlan:
        """Stop for so long that the job hangs: the host, or with ``on_device`` the current CUDA stream."""
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
        """Send this process a signal that stops it (SIGSTOP) or ends it (SIGKILL, SIGSEGV, ...)."""
        manifestation = _HANG if number is signal.SIGSTOP else _CRASH
        return self._add(rank, at, step, Signal(number), manifestation)

    def change_collective(
        self, *, rank: int, at: str, axis: str, step: Steps, what: str, calls: range | None = FIRST
    ) -> FaultPlan:
        """Issue a collective of another ``dtype``, ``operation`` or ``shape`` than the other ranks."""
        return self._add(rank, at, step, Change(what), _HANG, calls, axis)

    def skip_collective(
        self, *, rank: int, at: str, axis: str, step: Steps, calls: range | None = FIRST
    ) -> FaultPlan:
        """Skip a collective that the other ranks enter."""
        return self._add(rank, at, step, Skip(), _HANG, calls, axis)

    def swap_collectives(
        self, *, rank: int, at: str, axis: str, step: Steps, calls: range | None = FIRST
    ) -> FaultPlan:
        """Enter the next collective, on any group, before this one."""
        return self._add(rank, at, step, Swap(), _HANG, calls, axis)

    def stick_collective(
        self, *, ranks: Sequence[int], at: str, axis: str, step: Steps, seconds: float
    ) -> FaultPlan:
        """Let all of these ranks enter a collective and stay inside for ``seconds``."""
        return self._add(ranks, at, step, StayInside(seconds), _HANG, FIRST, axis)

    def _add(
        self,
        ranks: int | Sequence[int],
        at: str,
        step: Steps,
        effect: Effect,
        manifestation: Manifestation,
        calls: range | None = FIRST,
        axis: str | None = None,
    ) -> FaultPlan:
        who, when = [ranks] if isinstance(ranks, int) else ranks, steps_of(step)
        added = [Fault(rank, at, when, effect, manifestation, calls, axis) for rank in who]
        return FaultPlan((*self.planned, *added))


_MOMENTS = ("forward", "backward")
_TIMED = (SiteKind.PASS, SiteKind.PHASE, SiteKind.COLLECTIVE)
_HANGS = ("issued/", "fingerprint/", "digest/", "splits/", "deadlock", "process")
_Named = TypeVar("_Named")


def check(faults: Iterable[Fault], mesh: Mesh | int, model: nn.Module) -> None:
    """Raise ``ValueError`` for the first fault that is impossible in this job."""
    size = mesh if isinstance(mesh, int) else len(mesh)
    for fault in faults:
        if fault.rank >= size:
            raise ValueError(f"{_described(fault)}: the job has ranks 0 to {size - 1}")
        _check_effect(fault)
        _check_place(fault, model)
        _check_surface(fault)
        if isinstance(mesh, Mesh):
            _check_visibility(fault, mesh)


def module_at(place: FaultSite, model: nn.Module) -> nn.Module:
    """The module of a site. Raises ``ValueError`` if the model has none."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    return _named(place.module, modules, "module")


def tensor_at(place: FaultSite, model: nn.Module) -> torch.Tensor:
    """The parameter or buffer of a site. Raises ``ValueError`` if the model has none."""
    known: dict[str, torch.Tensor] = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return _named(place.tensor, known, "parameter")


def _check_effect(fault: Fault) -> None:
    """Whether the effect is possible at this kind of site."""
    kind, name = fault.place.kind, fault.place.name
    if isinstance(fault.effect, TensorEffect):
        if kind in (SiteKind.STEP, SiteKind.PHASE) or (kind is SiteKind.PASS and name in _MOMENTS):
            raise ValueError(
                f"{_described(fault)}: this site has no tensor; use MODULE/output or MODULE/PARAMETER"
            )
        if kind is SiteKind.COLLECTIVE and name in POINT_TO_POINT:
            # A receive over Gloo can be waited for only once, and its caller does so.
            raise ValueError(f"{_described(fault)}: point-to-point messages cannot be corrupted")
    elif isinstance(fault.effect, CallEffect | StayInside):
        if kind is not SiteKind.COLLECTIVE:
            raise ValueError(f"{_described(fault)}: needs a collective, such as all_reduce@GROUP")
    elif fault.manifestation is Manifestation.STRAGGLER and kind not in _TIMED:
        raise ValueError(
            f"{_described(fault)}: cannot be detected, since this site is not timed; "
            "delay MODULE/forward, MODULE/backward, a collective, input or checkpoint_write"
        )


def _check_place(fault: Fault, model: nn.Module) -> None:
    """Whether the model has this site, and the effect fits its tensor."""
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
                raise ValueError(f"{_described(fault)}: {error}") from error


def _check_surface(fault: Fault) -> None:
    """Whether the expected surface belongs to this kind of failure."""
    surfaces = fault.shown.surface.split("|") if fault.shown.surface is not None else []
    for surface in surfaces:
        fits = {
            Manifestation.STRAGGLER: surface.startswith("time/"),
            Manifestation.HANG: surface.startswith(_HANGS),
            Manifestation.CRASH: surface == "process",
            Manifestation.SDC: "/" in surface and not surface.startswith(("time/", *_HANGS)),
        }[fault.manifestation]
        if not fits:
            raise ValueError(f"{_described(fault)}: no {fault.manifestation.value} shows on {surface!r}")


def _check_visibility(fault: Fault, mesh: Mesh) -> None:
    surface_of(fault, mesh)
    is_causal = fault.manifestation.stops_job or fault.place.kind is SiteKind.COLLECTIVE
    if not is_causal and not peers_of(fault, mesh).can_compare:
        raise ValueError(
            f"{_described(fault)}: rank {fault.rank} has no peer to be compared with in this mesh"
        )
    is_computed = fault.manifestation is Manifestation.SDC and fault.place.kind in (
        SiteKind.PASS,
        SiteKind.GRADIENT,
    )
    if is_computed and fault.calls == FIRST:
        raise ValueError(
            f"{_described(fault)}: hits only training's own pass, so replicas agree in replay; use "
            "calls=range(1, 200) for replay's passes, or None for all"
        )


def _described(fault: Fault) -> str:
    return f"{fault.effect} on rank {fault.rank} at {fault.at!r}"


def _named(name: str, known: Mapping[str, _Named], kind: str, owner: str = "the model") -> _Named:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or sorted(known)[:3]
        raise ValueError(f"{owner} has no {kind} {name!r}; did you mean {', '.join(map(repr, near))}?")
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
"""How often each kind is drawn. Of the first three, the bit flips, about one in three has a single bit."""


def realistic(
    seed: int,
    *,
    steps: Sequence[int],
    ranks: Sequence[int],
    places: Mapping[str, int],
    width: int = 32,
    calls: range | None = FIRST,
) -> FaultPlan:
    """Draw one corruption in each of ``steps``, on one of ``ranks``, at one of ``places``.

    ``places`` has the number of elements at each site; ``width`` is the number of bits of an element. The
    same seed gives the same plan on every rank and in every run.
    """
    if not (steps and ranks and places):
        raise ValueError("a realistic plan needs steps, ranks and places to draw from")
    if empty := [at for at, elements in places.items() if elements < 1]:
        raise ValueError(f"{empty[0]!r} has no elements")
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
