"""One planned fault: what happens to whom, where and when. Plain data; ``Injector`` carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchscout.decision.record import Manifestation, Scope, Surface
from torchscout.faults.call_effects import CallEffect
from torchscout.faults.place import FIRST, Place
from torchscout.faults.process_effects import ProcessEffect
from torchscout.faults.tensor_effects import TensorEffect
from torchscout.faults.when import Recurring
from torchscout.mesh import Role

__all__ = ["Effect", "Fault", "Shown"]

Effect = ProcessEffect | TensorEffect | CallEffect


@dataclass(frozen=True, slots=True)
class Shown:
    """What the plan's author knows of the finding, where it does not follow from the fault alone."""

    surface: Surface | None = None
    scope: Scope | None = None
    ranks: tuple[int, ...] | None = None
    role: Role | None = None
    """Whose peers vote, where experts are carved out of data parallelism."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One effect on one rank at one place."""

    rank: int
    at: str
    """A place: ``MODULE/what``, a collective, a phase, or ``step`` for the moment before the optimizer runs.

    ``what`` is ``output``, ``input``, ``grad_output``, ``grad_input``, ``forward`` or ``backward`` (the
    moments before those passes), the name of a parameter or buffer, or ``PARAMETER.grad`` and
    ``PARAMETER.SLOT`` for its gradient and its optimizer state. ``PARAMETER.gradient`` is what this rank's
    backward computes, before any reduction. ``broadcast@DESCRIPTION`` is a collective on a process group of
    that description, and what it leaves in this rank's memory. ``input``, ``checkpoint_read`` and
    ``checkpoint_write`` are the phases that ``Injector.input`` and ``Injector.checkpoint_io`` are put around.
    """
    when: range | Recurring
    """Training steps, counted from 1; the step ends with the optimizer."""
    effect: Effect
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

    @property
    def place(self) -> Place:
        return Place.read(self.at)

    @property
    def steps(self) -> range:
        """Those in which it may happen."""
        return self.when.steps if isinstance(self.when, Recurring) else self.when
