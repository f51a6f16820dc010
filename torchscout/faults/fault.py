"""One planned fault: its rank, site, steps and effect. Plain data, which ``Injector`` carries out.

A fault that recurs at random is drawn for each step from a seed, so that all ranks and all runs agree.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum

import xxhash

from torchscout.decision.types import Manifestation, Scope, Surface
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
"""The first pass over a site in a step."""

STEP = "step"
"""The site just before the optimizer step."""
FORWARD = ("forward", "input", "output")
BACKWARD = ("backward", "grad_output", "grad_input")
_PHASES = ("input", "checkpoint_read", "checkpoint_write")


class SiteKind(str, Enum):
    STEP = "step"
    PHASE = "phase"
    """Fetching a batch, reading or writing a checkpoint."""
    COLLECTIVE = "collective"
    PASS = "pass"
    """A module's forward or backward pass, and its inputs and outputs."""
    GRADIENT = "gradient"
    """A parameter's gradient as computed by this rank, before any reduction."""
    STATE = "state"
    """A parameter, its reduced gradient, its optimizer state, or a buffer."""


@dataclass(frozen=True, slots=True)
class FaultSite:
    """The parsed site of a fault."""

    kind: SiteKind
    module: str = ""
    """The module's dotted path; empty for the model itself."""
    name: str = ""
    """The name of a pass, phase, parameter, buffer or collective operation."""
    slot: str = ""
    """``grad``, or a key of the optimizer state; for a collective, the description of its process group."""

    @classmethod
    def read(cls, at: str) -> FaultSite:
        """Parse ``step``, ``input``, ``all_reduce@GROUP``, ``layer.2/output``, ``layer.2/weight.exp_avg``."""
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
                f"{at!r} is not a site; use MODULE/output, MODULE/PARAMETER, OPERATION@GROUP, "
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
    """An intermittent fault: happens in each of ``steps`` with some probability."""

    steps: range
    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ValueError(f"probability must be above 0 and at most 1, got {self.probability}")

    def __contains__(self, step: object) -> bool:
        drawn = xxhash.xxh3_64_intdigest(f"{self.seed} {step}".encode()) / 2**64
        return step in self.steps and drawn < self.probability


Steps = int | range | Recurring
"""When a fault happens, in training steps counted from 1."""


def since(step: int) -> range:
    """A persistent fault: this step and all later ones."""
    return range(step, sys.maxsize)


def steps_of(when: Steps) -> range | Recurring:
    """The steps as a container. Raises ``ValueError`` for steps below 1."""
    if isinstance(when, int):
        when = range(when, when + 1)
    steps = when.steps if isinstance(when, Recurring) else when
    if not steps or min(steps[0], steps[-1]) < 1:
        raise ValueError(f"steps count from 1, got {steps}")
    return when


Effect = ProcessEffect | TensorEffect | CallEffect


@dataclass(frozen=True, slots=True)
class Shown:
    """What the plan's author expects of the finding, if it does not follow from the fault alone."""

    surface: Surface | None = None
    scope: Scope | None = None
    ranks: tuple[int, ...] | None = None
    role: LayerKind | None = None
    """The kind of layer whose peers vote, if experts are carved out of data parallelism."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One effect on one rank at one site."""

    rank: int
    at: str
    """A site: ``MODULE/what``, a collective, a phase, or ``step`` for the moment before the optimizer step.

    ``what`` is ``output``, ``input``, ``grad_output``, ``grad_input``, ``forward`` or ``backward`` (the
    moments before those passes), the name of a parameter or buffer, or ``PARAMETER.grad`` and
    ``PARAMETER.SLOT`` for its gradient and its optimizer state. ``PARAMETER.gradient`` is the gradient that
    this rank computes, before any reduction. ``broadcast@DESCRIPTION`` is a collective on a process group of
    that description, and its output on this rank. ``input``, ``checkpoint_read`` and ``checkpoint_write``
    are the phases of ``Injector.input`` and ``Injector.checkpoint_io``.
    """
    when: range | Recurring
    """Training steps, counted from 1; a step ends with the optimizer step."""
    effect: Effect
    manifestation: Manifestation
    calls: range | None = FIRST
    """Which passes over the site within a step, counted from 0; None for all. Later passes are replay's."""
    axis: str | None = None
    """The mesh axis of a collective's process group."""
    shown: Shown = field(default_factory=Shown)
    """What is known of the finding."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank must not be negative, got {self.rank}")

    @property
    def place(self) -> FaultSite:
        return FaultSite.read(self.at)

    @property
    def steps(self) -> range:
        """The steps in which it may happen."""
        return self.when.steps if isinstance(self.when, Recurring) else self.when
