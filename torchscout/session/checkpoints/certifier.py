"""Decides which steps are certified: the checkpoint gate of a session (paper, section 8).

``session.checkpoints.manager`` is the certifier of a job with checkpoints, ``CertifiedSteps`` of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torchscout.checkpoint.state.training_state import Stateful
from torchscout.checkpoint.trust import ledger
from torchscout.checkpoint.trust.certification import CheckVote, events_of
from torchscout.checkpoint.trust.gate import CheckpointGate, transition
from torchscout.checkpoint.trust.gate_state import Outcome, Realigned
from torchscout.decision.types import Trust
from torchscout.replay.capture.saved_calls import SavedCalls
from torchscout.session.checkpoints.promotion import CheckCoverage, PromotionRule
from torchscout.session.replay.coverage import RecipeCycle

__all__ = ["CertifiedSteps", "Certifier", "certified_step", "trust_in"]


class Certifier(Protocol):
    """The gate that checks move. Every rank makes the same calls in the same order."""

    captures: bool
    """Whether state is captured after accepted checks, so that ``signature`` has to be compared."""
    saved_calls: SavedCalls
    """The calls that a later sweep replays."""

    @property
    def certified_step(self) -> int | None:
        """The newest step whose state is certified; None if there is none yet."""
        ...

    def set_coverage(
        self, coverage: RecipeCycle, progress: Mapping[str, Stateful], covered: Callable[[], str]
    ) -> None:
        """1. Called once, before the first check, with what checks cover.

        ``progress`` has to be saved with checkpoints. ``covered`` describes the coverage so far.
        """
        ...

    def signature(self) -> int | None:
        """2. Called in every check if ``captures``: the signature of the replicated state that was captured
        after the previous check, or None if there is none."""
        ...

    def votes(self, outcome: Outcome, *, differs: bool) -> list[int]:
        """3. Return this rank's votes on the check, as many on every rank. ``differs`` if the state captured
        after the previous check cannot be trusted."""
        ...

    def decide(self, step: int, counted: Sequence[int], check: CheckCoverage) -> None:
        """4. Apply the highest of all ranks' votes on a check. What an accepted one certifies depends on what
        it covers."""
        ...

    def state(self) -> Any:
        """Return the gate as JSON, for ``agree``."""
        ...

    def agree(self, states: Sequence[Any]) -> None:
        """Called with the ``state`` of every rank before checks continue after one that failed.

        Some ranks may have applied the votes of that check while others have not. Certified stays what every
        rank knows to be certified; nothing since then is.
        """
        ...


class CertifiedSteps:
    """The gate by itself, for a job that writes its own checkpoints or none."""

    captures = False

    def __init__(self) -> None:
        self.saved_calls = SavedCalls()
        self._gate = CheckpointGate()
        self._rule = PromotionRule("full", None)

    @property
    def certified_step(self) -> int | None:
        return certified_step(self._gate)

    def set_coverage(self, coverage: RecipeCycle, *_: object) -> None:
        self._rule = PromotionRule("full", coverage.recipes)
        self._gate = replace(self._gate, recipes=self._rule.recipes)

    def signature(self) -> int | None:
        return None

    def votes(self, outcome: Outcome, *, differs: bool) -> list[int]:
        return CheckVote(outcome, self._gate.accepted, lost=differs).votes()

    def state(self) -> Any:
        return self._gate.to_json()

    def agree(self, states: Sequence[Any]) -> None:
        self._gate, _ = transition(self._gate, Realigned(ledger.realigned(states)))

    def decide(self, step: int, counted: Sequence[int], check: CheckCoverage) -> None:
        for event in events_of(self._gate, step, CheckVote.counted(counted), self._rule.worth(check)):
            self._gate, _ = transition(self._gate, event)


def trust_in(state: Any, step: int) -> Trust:
    """Return which generations the gate has after the check of a step; ``state`` is ``Certifier.state``'s."""
    gate = CheckpointGate.from_json(state)
    names = ("latest", "candidate", "verified")
    steps = {name: None if (each := getattr(gate, name)) is None else each.step for name in names}
    return Trust(step=step, poisoned=gate.poisoned, **steps)


def certified_step(gate: CheckpointGate) -> int | None:
    """The newest step that checks have certified, whether or not its capture is sealed yet."""
    # An accepted check of a dense model certifies at once; a catalog needs two cycles.
    certified = gate.pending if gate.recipes is None and gate.pending is not None else gate.verified
    return None if certified is None else certified.step
