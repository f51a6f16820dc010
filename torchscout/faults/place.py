"""Where a fault can happen: the words after ``at``, read once.

Whether a model, an optimizer or a job has such a place is for ``check`` and the injector to find out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["BACKWARD", "FORWARD", "STEP", "Kind", "Place"]

STEP = "step"
"""The moment before the optimizer runs."""
FORWARD = ("forward", "input", "output")
BACKWARD = ("backward", "grad_output", "grad_input")
_PHASES = ("input", "checkpoint_read", "checkpoint_write")


class Kind(str, Enum):
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
class Place:
    """One place, in parts."""

    kind: Kind
    module: str = ""
    """Its dotted path; empty for the model itself."""
    name: str = ""
    """Of a pass, a phase, a parameter or buffer, or of a collective's operation."""
    slot: str = ""
    """``grad``, or a slot of the optimizer; of a collective the description of its process group."""

    @classmethod
    def read(cls, at: str) -> Place:
        """``step``, ``input``, ``all_reduce@GROUP``, ``layer.2/output``, ``layer.2/weight.exp_avg``, ..."""
        if at == STEP:
            return cls(Kind.STEP)
        if at in _PHASES:
            return cls(Kind.PHASE, name=at)
        if "@" in at:
            operation, _, description = at.partition("@")
            return cls(Kind.COLLECTIVE, name=operation, slot=description)
        module, slash, what = at.rpartition("/")
        if not slash or not what:
            raise ValueError(
                f"{at!r} is no place; there are MODULE/output, MODULE/PARAMETER, OPERATION@GROUP, "
                f"{', '.join([STEP, *_PHASES])}"
            )
        if what in FORWARD + BACKWARD:
            return cls(Kind.PASS, module, what)
        name, _, slot = what.partition(".")
        return cls(Kind.GRADIENT if slot == "gradient" else Kind.STATE, module, name, slot)

    @property
    def tensor(self) -> str:
        """The dotted path of the parameter or buffer."""
        return f"{self.module}.{self.name}" if self.module else self.name
