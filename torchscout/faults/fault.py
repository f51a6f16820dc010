"""Which fault happens where and when, and what a perfect detector would say about it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torchscout.decision.record import Manifestation, Scope
from torchscout.faults.effects import (
    FlipBit,
    ProcessEffect,
    Scale,
    SetValue,
    Signal,
    Sleep,
    TensorEffect,
)
from torchscout.faults.place import Place
from torchscout.faults.truth import Shown, Truth, truths
from torchscout.mesh import Mesh, Role

__all__ = ["FIRST", "Fault", "Faults", "Truth"]


FIRST = range(1)
"""The first pass over a place in a step."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One effect on one rank at one place, in each of ``steps``."""

    rank: int
    at: str
    """A place: ``MODULE/what``, or ``step`` for the moment before the optimizer runs.

    ``what`` is ``output``, ``input``, ``grad_output``, ``grad_input``, ``forward`` or ``backward`` (the
    moments before those passes), a parameter's name, or ``PARAMETER.grad`` and ``PARAMETER.SLOT``
    for its gradient and its optimizer state. ``PARAMETER.gradient`` is what this rank's backward computes,
    before any reduction. ``broadcast@DESCRIPTION`` is what a collective leaves in this rank's memory, on
    a process group of that description.
    """
    steps: range
    """Training steps, counted from 1; the step ends with the optimizer."""
    effect: ProcessEffect | TensorEffect
    manifestation: Manifestation
    calls: range | None = FIRST
    """Which passes over the place within a step, counted from 0; None for all. Replay passes again."""
    axis: str | None = None
    """Of the mesh, along which the process group of a collective lies."""
    shown: Shown = field(default_factory=Shown)
    """What is known of the finding besides."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank must not be negative, got {self.rank}")
        if not self.steps or min(self.steps) < 1:
            raise ValueError(f"steps are counted from 1, got {self.steps}")

    @property
    def place(self) -> Place:
        return Place.read(self.at)

    def truth(self, mesh: Mesh) -> Truth:
        """What a perfect detector says of it, if nothing else is wrong."""
        (truth,) = truths([self], mesh)
        return truth


@dataclass(frozen=True, slots=True)
class Faults:
    """A plan of faults, built link by link; plain data that travels to every rank.

    ``Faults().flip_bit(rank=5, at="layer.2/weight", step=7, bit=30).delay(rank=1, ...)``

    ``step`` is one step or a ``range`` of them. ``Injector`` carries the plan out. ``calls`` says which
    passes over the place within a step it hits, all of them with None: the first is training's own.
    """

    planned: tuple[Fault, ...] = ()

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.planned)

    def __len__(self) -> int:
        return len(self.planned)

    def truth(self, mesh: Mesh) -> tuple[Truth, ...]:
        """What a perfect detector says of all of them; one finding may be of several faults."""
        return truths(self.planned, mesh)

    def showing(
        self,
        surface: str | None = None,
        *,
        scope: Scope | None = None,
        ranks: tuple[int, ...] | None = None,
        role: Role | None = None,
    ) -> Faults:
        """What is known of the last fault's finding: a part of a layer shows in the layer's output."""
        *before, last = self.planned
        return Faults((*before, replace(last, shown=Shown(surface, scope, ranks, role))))

    def flip_bit(
        self, *, rank: int, at: str, step: int | range, bit: int, index: int = 0, calls: range | None = FIRST
    ) -> Faults:
        """Flip one bit of one element; bit 0 is the least significant."""
        return self._add(rank, at, step, FlipBit(bit, index), Manifestation.SDC, calls)

    def set_value(
        self,
        *,
        rank: int,
        at: str,
        step: int | range,
        value: float,
        index: int = 0,
        calls: range | None = FIRST,
    ) -> Faults:
        return self._add(rank, at, step, SetValue(value, index), Manifestation.SDC, calls)

    def scale(
        self, *, rank: int, at: str, step: int | range, factor: float, calls: range | None = FIRST
    ) -> Faults:
        """Multiply a whole tensor."""
        return self._add(rank, at, step, Scale(factor), Manifestation.SDC, calls)

    def delay(
        self, *, rank: int, at: str, step: int | range, seconds: float, calls: range | None = FIRST
    ) -> Faults:
        """Be slow, and go on: a straggler. At a collective, it takes longer for this rank."""
        return self._add(rank, at, step, Sleep(seconds), Manifestation.STRAGGLER, calls)

    def slow_collective(
        self, *, ranks: Sequence[int], at: str, axis: str, step: int | range, seconds: float
    ) -> Faults:
        """Such collectives of a process group along ``axis`` take longer for these of its members."""
        faults = self
        for rank in ranks:
            planned = faults.delay(rank=rank, at=at, step=step, seconds=seconds, calls=None).planned
            faults = Faults((*planned[:-1], replace(planned[-1], axis=axis)))
        return faults

    def stall(self, *, rank: int, at: str, step: int | range, seconds: float) -> Faults:
        """Stop for so long that the job hangs."""
        return self._add(rank, at, step, Sleep(seconds), Manifestation.HANG)

    def signal(self, *, rank: int, step: int | range, number: signal.Signals, at: str = "step") -> Faults:
        """Send this process a signal: SIGKILL, SIGSTOP, ..."""
        return self._add(rank, at, step, Signal(number), Manifestation.HANG)

    def _add(
        self,
        rank: int,
        at: str,
        step: int | range,
        effect: ProcessEffect | TensorEffect,
        manifestation: Manifestation,
        calls: range | None = FIRST,
    ) -> Faults:
        steps = range(step, step + 1) if isinstance(step, int) else step
        return Faults((*self.planned, Fault(rank, at, steps, effect, manifestation, calls)))
