"""Up to which step a job is certified: for checkpoints that it writes itself (paper, section 8)."""

from __future__ import annotations

from dataclasses import replace

from torchscout.checkpoint.gate import CheckpointGate, after
from torchscout.checkpoint.happening import Checked, Lost, Outcome, Sealed, Written

__all__ = ["Trust"]


class Trust:
    """The gate of checkpoints, moved by checks alone; what it certifies, the job may have in its files."""

    def __init__(self) -> None:
        self._gate = CheckpointGate()

    @property
    def step(self) -> int | None:
        """The newest step whose state checks have certified; None if there is none yet."""
        return None if self._gate.verified is None else self._gate.verified.step

    def go_by(self, recipes: int | None) -> None:
        """How many checks make a cycle, where shapes come from a catalog."""
        self._gate = replace(self._gate, recipes=recipes)

    def checked(self, step: int, outcome: Outcome, *, counts: bool, doubted: bool = False) -> None:
        """The job's outcome, the same on every rank. Only a check that ``counts`` certifies.

        ``doubted`` is what was there after the check before: it may have changed before it was written.
        """
        if doubted and self._gate.latest is not None:
            self._gate, _ = after(self._gate, Lost(self._gate.latest))
        if outcome.accepted and not counts:
            return
        if self._gate.writing is not None:  # files are the job's own affair
            self._gate, _ = after(self._gate, Written(self._gate.writing))
        self._gate, effects = after(self._gate, Checked(step, outcome))
        if effects.capture is not None:  # and so is memory
            self._gate, _ = after(self._gate, Sealed(effects.capture))
