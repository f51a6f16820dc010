"""What a generation needs to be promoted to verified, and what a promoted one had (paper, section 8).

A check covers two things, which are counted apart. All *state* is compared or watched in every check. The
*paths* of a device, expert shapes of a catalog, are replayed a few at a time, and a cycle covers all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchscout.checkpoint.trust.gate_state import Outcome
from torchscout.checkpoint.trust.generation import Generation

__all__ = ["CheckCoverage", "Promotion", "PromotionRule"]


@dataclass(frozen=True, slots=True)
class CheckCoverage:
    """What one check covers, on all ranks alike."""

    paths: int = 0
    """Expert shapes of the catalog that were replayed."""
    state: bool = True
    """Whether the state of all layers was compared or watched."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """What a promoted generation had."""

    step: int
    coverage: str
    """What was needed; see ``CheckpointConfig.coverage``."""
    paths: int | None
    """The paths of the catalog; None without a catalog."""
    state: bool
    """Whether the check before its capture compared or watched the state of all layers."""
    before: int = 0
    """How many of them were accepted in a row up to the capture."""
    after: int = 0
    """How many of them were accepted in a row after it."""

    def to_json(self) -> dict[str, Any]:
        names = ("step", "coverage", "paths", "state", "before", "after")
        return {**{name: getattr(self, name) for name in names}, "sentence": self.sentence()}

    def sentence(self) -> str:
        what = (
            "the state of all layers" if self.state else "what was replayed, without the state of all layers"
        )
        accepted = f"Step {self.step} is verified: the check after it accepted {what}"
        if self.paths is None:
            return f"{accepted}."
        return (
            f"{accepted}. Of the {self.paths} paths of the expert catalog, {self.before} were accepted "
            f"before it was captured and {self.after} after that."
        )


class PromotionRule:
    """Decides what a check is worth, and remembers what each generation had when it was captured."""

    def __init__(self, coverage: str, paths: int | None) -> None:
        """``paths`` is the number of paths of the catalog; None without a catalog."""
        self._coverage, self._paths = coverage, paths
        self._row = 0
        """Paths accepted in a row; all of them are as good as more."""
        self._has_state = False
        """Whether the last check covered the state of all layers."""
        self._captured: dict[Generation, tuple[int, bool]] = {}
        """Both, when each generation was captured."""
        self.last: Promotion | None = None
        """The newest promotion in this run."""

    @property
    def recipes(self) -> int | None:
        """The paths that must be accepted before a capture, and again after it; None if none are needed."""
        return self._paths if self._coverage == "full" else None

    def worth(self, check: CheckCoverage) -> int:
        """Return how many recipes of the gate's cycle an accepted check counts for; 0 certifies nothing."""
        if self._paths is None:
            return 1
        return check.paths if self._coverage == "full" else int(check.state)

    def checked(self, outcome: Outcome, check: CheckCoverage) -> None:
        """Count the paths of one check."""
        self._row = min(self._row + check.paths, self._paths or 0) if outcome.accepted else 0
        self._has_state = check.state

    def captured(self, generation: Generation) -> None:
        """Remember what a generation has, which is captured after the check that was counted last."""
        newest = sorted(self._captured)[-_REMEMBERED:]
        self._captured = {each: self._captured[each] for each in newest}
        self._captured[generation] = (self._row, self._has_state)

    def promoted(self, generation: Generation) -> str | None:
        """Remember the promotion; return a sentence for the log, unless it is one of many."""
        (before, has_state), after = self._captured.get(generation, (0, False)), 0
        if self.recipes is not None:  # the gate has counted them
            before = after = self.recipes
        is_first = self.last is None
        self.last = Promotion(generation.step, self._coverage, self._paths, has_state, before, after)
        is_rare = self._paths is not None and (is_first or self.recipes is not None)
        return self.last.sentence() if is_rare else None


_REMEMBERED = 8
