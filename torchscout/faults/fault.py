"""One planned fault: what happens to which rank, where and when. Plain data; ``Injector`` carries it out.

``Place`` is the word after ``at``; whether a job has such a place ``plan.check`` and the injector find
out. A fault that recurs by chance is decided for each step by itself, from a seed, so that all ranks and
all runs decide alike.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum

import xxhash

from torchscout.decision.record import Manifestation, Scope, Surface
from torchscout.faults.effects import CallEffect, ProcessEffect, TensorEffect
from torchscout.mesh import LayerKind

__all__ = [
    "BACKWARD",
    "FIRST",
    "FORWARD",
    "STEP",
    "Effect",
    "Fault",
    "FaultSite",
    "Recurring",
    "Shown",
    "SiteKind",
    "Steps",
    "since",
    "steps_of",
]

FIRST = range(1)
"""The first pass over a place in a step."""

STEP = "step"
"""The moment before the optimizer runs."""
FORWARD = ("forward", "input", "output")
BACKWARD = ("backward", "grad_output", "grad_input")
_PHASES = ("input", "checkpoint_read", "checkpoint_write")


class SiteKind(str, Enum):
    STEP = "step"
    PHASE = "phase"
    """A batch is fetched, a checkpoint read or written."""
    COLLECTIVE = "collective"
    PASS = "pass"
    """A module's forward or backward pass, and what goes in and out of it."""
    GRADIENT = "gradient"
    """What this rank's own backward computes for a parameter, before any reduction."""
    STATE = "state"
    """What a rank holds: a parameter, its reduced gradient or a slot of its optimizer, a buffer."""


@dataclass(frozen=True, slots=True)
class FaultSite:
    """One place, in parts."""

    kind: SiteKind
    module: str = ""
    """Its dotted path; empty for the model itself."""
    name: str = ""
    """Of a pass, a phase, a parameter or buffer, or of a collective's operation."""
    slot: str = ""
    """``grad``, or a slot of the optimizer; of a collective the description of its process group."""

    @classmethod
    def read(cls, at: str) -> FaultSite:
        """``step``, ``input``, ``all_reduce@GROUP``, ``layer.2/output``, ``layer.2/weight.exp_avg``, ..."""
        if at == STEP:
            return cls(SiteKind.STEP)
        if at in _PHASES:
            return cls(SiteKind.PHASE, name=at)
        if "@" in at:
            operation, _, description = at.partition("@")
            return cls(SiteKind.COLLECTIVE, name=operation, slot=description)
        module, slash, what = at.rpartition("/")
        if not slash or not what:
            raise ValueError(
                f"{at!r} is no place; there are MODULE/output, MODULE/PARAMETER, OPERATION@GROUP, "
                f"{', '.join([STEP, *_PHASES])}"
            )
        if what in FORWARD + BACKWARD:
            return cls(SiteKind.PASS, module, what)
        name, _, slot = what.partition(".")
        return cls(SiteKind.GRADIENT if slot == "gradient" else SiteKind.STATE, module, name, slot)

    @property
    def tensor(self) -> str:
        """The dotted path of the parameter or buffer."""
        return f"{self.module}.{self.name}" if self.module else self.name


@dataclass(frozen=True, slots=True)
class Recurring:
    """In each of ``steps`` with some probability: an intermittent fault."""

    steps: range
    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ValueError(f"a probability is above 0 and at most 1, got {self.probability}")

    def __contains__(self, step: object) -> bool:
        drawn = xxhash.xxh3_64_intdigest(f"{self.seed} {step}".encode()) / 2**64
        return step in self.steps and drawn < self.probability


Steps = int | range | Recurring
"""How a plan says when, in training steps counted from 1."""


def since(step: int) -> range:
    """In this step and in all after it: a persistent fault."""
    return range(step, sys.maxsize)


def steps_of(when: Steps) -> range | Recurring:
    """The same, as something that a step can be in; a ``ValueError`` for steps that there are not."""
    if isinstance(when, int):
        when = range(when, when + 1)
    steps = when.steps if isinstance(when, Recurring) else when
    if not steps or min(steps[0], steps[-1]) < 1:
        raise ValueError(f"steps are counted from 1, got {steps}")
    return when


Effect = ProcessEffect | TensorEffect | CallEffect


@dataclass(frozen=True, slots=True)
class Shown:
    """What the plan's author knows of the finding, where it does not follow from the fault alone."""

    surface: Surface | None = None
    scope: Scope | None = None
    ranks: tuple[int, ...] | None = None
    role: LayerKind | None = None
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
    def place(self) -> FaultSite:
        return FaultSite.read(self.at)

    @property
    def steps(self) -> range:
        """Those in which it may happen."""
        return self.when.steps if isinstance(self.when, Recurring) else self.when
