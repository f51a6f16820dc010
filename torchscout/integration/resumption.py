"""What ``session.resume()`` answers, and what it asks of replay (paper, section 8). Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchscout.checkpoint.generation import TrustLevel
from torchscout.checkpoint.selection import SweepResult

__all__ = ["Resumption", "Sweeping", "Swept"]

Sweeping = Callable[[int, bool], "Swept"]
"""See ``integration.replaying.Replaying.sweep``."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a job goes on from."""

    step: int
    """Steps that are done; 0 if there was nothing to go back to."""
    role: TrustLevel | None
    """What the checkpoint was trusted for; None if there was none."""
    source: str | None
    """Where this rank got its state."""
    reason: str
    """Why this one, in words."""
    swept: SweepResult | None = None
    """What a replay of everything has shown on these workers; None if there was no need for one."""
    unswept: str | None = None
    """What it could not replay on this rank, and why; one of several perhaps."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What replay has found in a loaded state, before it is trained on; job-wide but for ``unswept``."""

    sweep: SweepResult
    is_state: bool
    """Whether replicas hold different state: then that is what was loaded, whoever computes well."""
    unswept: str | None
    """What could not be replayed on this rank, and why; one of several perhaps."""
