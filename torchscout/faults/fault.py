"""The plan of faults: fluent, plain data that travels to every rank, and knows its ground truth."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from torchscout.decision.record import Manifestation, Scope
from torchscout.faults.call_effects import CallEffect, Change, Skip, Swap
from torchscout.faults.check import check
from torchscout.faults.device_effects import DeviceSpin
from torchscout.faults.kernel_effects import PerturbKernel
from torchscout.faults.place import FIRST
from torchscout.faults.planned import Effect, Fault, Shown
from torchscout.faults.process_effects import Freeze, HoldInterpreter, Signal, Sleep, StayInside
from torchscout.faults.tensor_effects import FlipBit, FlipBits, Overwrite, Scale, SetValue, StuckBit
from torchscout.faults.truth import Truth, truths
from torchscout.faults.when import Steps, steps_of
from torchscout.mesh import Mesh, Role

__all__ = ["FIRST", "Fault", "Faults", "Truth"]

_SDC, _STRAGGLER, _HANG = Manifestation.SDC, Manifestation.STRAGGLER, Manifestation.HANG


@dataclass(frozen=True, slots=True)
class Faults:
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

    def __add__(self, other: Faults) -> Faults:
        return Faults(self.planned + other.planned)

    def of(self, rank: int) -> Faults:
        """One rank's share."""
        return Faults(tuple(fault for fault in self.planned if fault.rank == rank))

    def truth(self, mesh: Mesh) -> tuple[Truth, ...]:
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
        role: Role | None = None,
    ) -> Faults:
        """What is known of the last fault's finding: a part of a layer shows in the layer's output."""
        *before, last = self.planned
        return Faults((*before, replace(last, shown=Shown(surface, scope, ranks, role))))

    def flip_bit(
        self, *, rank: int, at: str, step: Steps, bit: int, index: int = 0, calls: range | None = FIRST
    ) -> Faults:
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
    ) -> Faults:
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
    ) -> Faults:
        """A bit of one element can only be ``value``, 0 or 1, whenever the place is passed."""
        return self._add(rank, at, step, StuckBit(bit, value, index), _SDC, calls)

    def set_value(
        self, *, rank: int, at: str, step: Steps, value: float, index: int = 0, calls: range | None = FIRST
    ) -> Faults:
        return self._add(rank, at, step, SetValue(value, index), _SDC, calls)

    def scale(self, *, rank: int, at: str, step: Steps, factor: float, calls: range | None = FIRST) -> Faults:
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
    ) -> Faults:
        """Neighbouring elements become noise drawn from a seed, or all one value."""
        effect = Overwrite(elements.start, len(elements), seed, value)
        return self._add(rank, at, step, effect, _SDC, calls)

    def perturb_kernel(self, *, rank: int, at: str, step: Steps, tile: int = 0, within: int = -1) -> Faults:
        """Experts on a ``SickGemm`` compute a tile, or a step ``within`` it, wrong from MODULE/forward on."""
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
    ) -> Faults:
        """Be slow, and go on: a straggler. Modules, fetching batches, reading and writing checkpoints.

        The host sleeps; ``on_device`` a kernel keeps the current CUDA stream busy instead.
        """
        effect = DeviceSpin(seconds) if on_device else Sleep(seconds)
        return self._add(rank, at, step, effect, _STRAGGLER, calls)

    def slow_collective(
        self, *, ranks: Sequence[int], at: str, axis: str, step: Steps, seconds: float
    ) -> Faults:
        """These members are late at every such collective of a process group that lies along ``axis``."""
        return self._add_each(ranks, at, axis, step, Sleep(seconds), _STRAGGLER, None)

    def stall(self, *, rank: int, at: str, step: Steps, seconds: float, on_device: bool = False) -> Faults:
        """Stop for so long that the job hangs: the host, or ``on_device`` the current CUDA stream."""
        return self._add(rank, at, step, DeviceSpin(seconds) if on_device else Sleep(seconds), _HANG)

    def freeze(self, *, rank: int, step: Steps, seconds: float, at: str = "step") -> Faults:
        """Stop the process by a signal, for so long that the job hangs."""
        return self._add(rank, at, step, Freeze(seconds), _HANG)

    def hold_interpreter(self, *, rank: int, step: Steps, seconds: float, at: str = "step") -> Faults:
        """No thread of the process runs Python, for so long that the job hangs."""
        return self._add(rank, at, step, HoldInterpreter(seconds), _HANG)

    def kill(self, *, rank: int, step: Steps, at: str = "step") -> Faults:
        return self.signal(rank=rank, step=step, number=signal.SIGKILL, at=at)

    def signal(self, *, rank: int, step: Steps, number: signal.Signals, at: str = "step") -> Faults:
        """Send this process a signal: SIGKILL, SIGSTOP, ..."""
        return self._add(rank, at, step, Signal(number), _HANG)

    def change_collective(
        self, *, rank: int, at: str, axis: str, step: Steps, what: str, calls: range | None = FIRST
    ) -> Faults:
        """Issue a collective of another ``dtype``, ``operation`` or ``shape`` than the other members do."""
        return self._add_each([rank], at, axis, step, Change(what), _HANG, calls)

    def skip_collective(
        self, *, rank: int, at: str, axis: str, step: Steps, calls: range | None = FIRST
    ) -> Faults:
        """Go on without a collective that the other members enter."""
        return self._add_each([rank], at, axis, step, Skip(), _HANG, calls)

    def swap_collectives(
        self, *, rank: int, at: str, axis: str, step: Steps, calls: range | None = FIRST
    ) -> Faults:
        """Enter the next collective, on whatever group, before this one."""
        return self._add_each([rank], at, axis, step, Swap(), _HANG, calls)

    def stick_collective(
        self, *, ranks: Sequence[int], at: str, axis: str, step: Steps, seconds: float
    ) -> Faults:
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
    ) -> Faults:
        when = steps_of(step)
        added = [Fault(rank, at, when, effect, manifestation, calls, axis) for rank in ranks]
        return Faults((*self.planned, *added))

    def _add(
        self,
        rank: int,
        at: str,
        step: Steps,
        effect: Effect,
        manifestation: Manifestation,
        calls: range | None = FIRST,
    ) -> Faults:
        return Faults((*self.planned, Fault(rank, at, steps_of(step), effect, manifestation, calls)))
