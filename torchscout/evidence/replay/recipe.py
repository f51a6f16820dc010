"""What can be replayed, and what a replay yields (paper, section 6.1).

A recipe knows one kind of work and the targets it rotates over; a replay is one execution of it at the
end of one training step. ``replayer`` makes the calls, in the order in which they are numbered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import xxhash

from torchscout.decision.fold import signed
from torchscout.decision.record import Surface
from torchscout.decision.replay_diagnosis import INPUT, STATE

__all__ = [
    "ABSENT",
    "POISON",
    "Broadcast",
    "Comparison",
    "Mode",
    "Observation",
    "Recipe",
    "Replay",
]

ABSENT = signed(xxhash.xxh3_64_intdigest(b"torchscout: there is nothing to compare here"))
"""In place of a signature: this rank has no such tensor. Not checked if no peer has it, else a difference."""
POISON = signed(xxhash.xxh3_64_intdigest(b"torchscout: this rank failed in replay"))
"""In place of a signature: this rank could not compute it. Never evidence against anybody."""

Broadcast = Callable[[torch.Tensor], None]
"""Fills a contiguous tensor, on every peer, with what the source's holds."""


class Mode:
    """What a comparison is about, as records spell it."""

    INPUT = INPUT
    """Whether peers started from the same values."""
    STATE = STATE
    """What a rank holds: weights, optimizer slots."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing the peers will compare; known before anything is computed, and the same on all of them."""

    surface: Surface
    mode: str
    premises: tuple[Surface, ...] = ()
    """Surfaces of the same replay that must agree first: a result says nothing if the inputs differed."""
    summary: Surface | None = None
    """Under this name agreeing comparisons are recorded as one: a census has thousands."""
    absent: str = "there was nothing to compare"
    """The reason to give where no peer had anything."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one replay produces on this rank, filled in as it goes: what was seen before a failure counts."""

    signatures: dict[Surface, int] = field(default_factory=dict)
    """One for each comparison, ``ABSENT`` where there was no tensor."""
    times: dict[Surface, float] = field(default_factory=dict)
    """Milliseconds."""


class Recipe(Protocol):
    """One kind of work: the embedding, hidden layers, the output layer, the optimizer, all state."""

    @property
    def kind(self) -> str: ...

    @property
    def targets(self) -> Sequence[str]:
        """What the rotation goes through, by name; the same on every peer."""
        ...

    @property
    def varies(self) -> bool:
        """Whether scaled inputs make sense; otherwise it is observed once, as captured."""
        ...

    def begin(self, target: int, *, is_source: bool) -> Replay:
        """Called before the training step at whose end the target is due: start to capture.

        Only the source's values will be needed; the others may keep descriptions alone.
        """
        ...


class Replay(Protocol):
    """One execution. Every peer makes the same calls in this order; only 3 communicates."""

    def describe(self) -> Any:
        """1. After the update: what this rank has captured, as JSON. May raise ``ReplayError``."""
        ...

    def prepare(self, descriptions: Sequence[Any], source: int) -> None:
        """2. With every peer's description, in peer order: make room for the source's values.

        Everything that may fail belongs here. May raise ``ReplayError``.
        """
        ...

    def align(self, broadcast: Broadcast) -> None:
        """3. Receive the source's values; called on all peers or on none."""
        ...

    def comparisons(self) -> Sequence[Comparison]:
        """4. What ``observe`` will find, in order; the same on every peer."""
        ...

    def observe(self, variant: float, seen: Observation) -> None:
        """5. Compute, with floating inputs scaled by ``variant``, and fill in what was seen. Called once for
        each variant, and again for a second replay: it must leave the aligned values as they are, and
        training untouched."""
        ...

    def release(self) -> None:
        """6. Let go of everything, whether or not any other call was made."""
        ...
