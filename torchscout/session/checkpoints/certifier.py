"""Decides what a check certifies: the votes of all ranks become events of the gate (paper, sections 8 and 9).

``session.checkpoints.manager`` is the certifier of a job with checkpoints, ``CertifiedSteps`` of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import (
    Changed,
    Checked,
    CheckpointGate,
    Event,
    Generation,
    Outcome,
    transition,
)
from torchscout.decision.repeatability import REFUSED, UNDECIDED, unmet
from torchscout.decision.sdc import FAILED
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation, Trust
from torchscout.errors import CheckpointError
from torchscout.replay.capture.saved_calls import SavedCalls
from torchscout.session.replay.coverage import RecipeCycle
from torchscout.state.collect import Stateful

__all__ = [
    "SEVERITY",
    "CertifiedSteps",
    "Certifier",
    "CheckCoverage",
    "CheckVote",
    "PromotionRule",
    "certified_step",
    "events_of",
    "outcome_of",
    "trust_in",
]

SEVERITY = (Outcome.HEALTHY, Outcome.STRAGGLER, Outcome.NOT_CHECKED, Outcome.REJECTED, Outcome.SDC)
"""From best to worst; the worst outcome on any rank is the job's."""


def outcome_of(
    records: Sequence[EvidenceRecord],
    incidents: Collection[Incident],
    targets: Collection[str],
    require: Collection[str] = (),
) -> Outcome:
    """Return one rank's outcome of a check of these ``targets``.

    Every target must have been compared, or be one that replay cannot repeat, such as an update that
    communicates; the unnamed target, state in general, must have been compared. Records of nondeterministic
    kernels and of failed replays have no verdict. A check may be accepted without a surface that no rank has
    (a parameter without a gradient) or that does not repeat, unless ``require`` names it; see
    ``ReplayConfig.require``.
    """
    numbers = [each for each in records if each.manifestation is Manifestation.SDC]
    if any(each.scope is not None for each in numbers):
        return Outcome.SDC
    if any(_begins(each, UNDECIDED) for each in numbers):
        return Outcome.REJECTED
    compared = {each.layer or "" for each in numbers if each.verdict is not None}
    compared |= {each.layer for each in numbers if each.layer and _begins(each, REFUSED)}
    failed = any(_begins(each, FAILED) for each in numbers)
    if failed or not set(targets) <= compared or unmet(numbers, require):
        return Outcome.NOT_CHECKED
    slow = any(each.manifestation is Manifestation.STRAGGLER for each in incidents)
    return Outcome.STRAGGLER if slow else Outcome.HEALTHY


def _begins(record: EvidenceRecord, reason: str) -> bool:
    return record.reason is not None and record.reason.startswith(reason)


@dataclass(frozen=True, slots=True)
class CheckVote:
    """One rank's vote at the end of a check. Of each field the highest value on any rank counts."""

    outcome: Outcome
    accepted_recipes: int
    """Its gate's."""
    lost: bool = False
    """The pending generation could not be captured on this rank."""
    writing: bool = False
    """This rank has not sealed the files that are due yet."""
    unwritten: bool = False
    """This rank could not write them."""
    unready: bool = False
    """This rank has no buffer to capture its state in."""

    def votes(self) -> list[int]:
        """The vote as integers, to be combined by taking the maximum of each."""
        count, flags = self.accepted_recipes, (self.lost, self.writing, self.unwritten, self.unready)
        return [SEVERITY.index(self.outcome), count, -count, *map(int, flags)]

    @classmethod
    def counted(cls, highest: Sequence[int]) -> CheckVote:
        """The job's vote; raises ``CheckpointError`` on every rank if ranks are in different cycles."""
        severity, count, negated, *flags = highest
        if count != -negated:
            raise CheckpointError(
                f"ranks disagree about the current cycle: some have accepted {-negated} of its recipes, "
                f"others {count}; no checkpoint was changed"
            )
        return cls(SEVERITY[severity], count, *map(bool, flags))


def events_of(gate: CheckpointGate, step: int, counted: CheckVote, recipes: int = 1) -> list[Event]:
    """The events since the last check, in order, and the check itself, which has replayed so many recipes."""
    events: list[Event] = []
    if gate.pending is not None:
        events.append(Changed("lost" if counted.lost else "sealed", gate.pending))
    if gate.writing is not None and (counted.unwritten or not counted.writing):
        events.append(Changed("write_failed" if counted.unwritten else "written", gate.writing))
    return [*events, Checked(step, counted.outcome, recipes, can_capture=not counted.unready)]


@dataclass(frozen=True, slots=True)
class CheckCoverage:
    """What one check covers, on all ranks alike.

    All *state* is compared or watched in every check. The *paths* of a device, expert shapes of a catalog,
    are replayed a few at a time, and a cycle covers all of them.
    """

    paths: int = 0
    """Expert shapes of the catalog that were replayed."""
    state: bool = True
    """Whether the state of all layers was compared or watched."""


class PromotionRule:
    """Says how much a check counts, and remembers what each generation had when it was captured."""

    def __init__(self, coverage: str, paths: int | None) -> None:
        """``paths`` is the number of paths of the catalog; None without a catalog."""
        self._coverage = coverage
        self._paths = paths
        self.recipes = paths if coverage == "full" else None
        """The paths that must be accepted before a capture, and again after it; None if none are needed."""
        self._row = 0
        """Paths accepted in a row; all of them are as good as more."""
        self._has_state = False
        """Whether the last check covered the state of all layers."""
        self._captured: dict[Generation, tuple[int, bool]] = {}
        """Both, when each of the last generations was captured."""
        self.promotion: dict[str, Any] | None = None
        """What the newest promoted generation had: whether the check before its capture compared or watched
        the ``state`` of all layers, and how many paths were accepted in a row ``before`` it and ``after``."""

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
        is_rare = self._paths is not None and (self.promotion is None or self.recipes is not None)
        what = "the state of all layers"
        what = what if has_state else f"what was replayed, without {what}"
        sentence = f"Step {generation.step} is verified: the check after it accepted {what}."
        if self._paths is not None:
            sentence += (
                f" Of the {self._paths} paths of the expert catalog, {before} were accepted before it was "
                f"captured and {after} after that."
            )
        self.promotion = {
            "step": generation.step,
            "coverage": self._coverage,
            "paths": self._paths,
            "state": has_state,
            "before": before,
            "after": after,
            "sentence": sentence,
        }
        return sentence if is_rare else None


_REMEMBERED = 8


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
        return CheckVote(outcome, self._gate.accepted_recipes, lost=differs).votes()

    def state(self) -> Any:
        return self._gate.to_json()

    def agree(self, states: Sequence[Any]) -> None:
        self._gate = ledger.realigned([*map(CheckpointGate.from_json, states)])

    def decide(self, step: int, counted: Sequence[int], check: CheckCoverage) -> None:
        for event in events_of(self._gate, step, CheckVote.counted(counted), self._rule.worth(check)):
            self._gate, _ = transition(self._gate, event)


def trust_in(state: Any, step: int, *, is_kept: bool) -> Trust:
    """Return which generations the gate has after the check of a step; ``state`` is ``Certifier.state``'s."""
    gate = CheckpointGate.from_json(state)
    if not is_kept:
        return Trust(
            step=step,
            latest=None,
            candidate=None,
            verified=certified_step(gate),
            poisoned=gate.poisoned,
            is_kept=False,
        )
    roles = {name: gate.steps()[name] for name in ("latest", "candidate", "verified")}
    return Trust(step=step, poisoned=gate.poisoned, **roles)


def certified_step(gate: CheckpointGate) -> int | None:
    """The newest step that checks have certified, whether or not its capture is sealed yet."""
    # An accepted check of a dense model certifies at once; a catalog needs two cycles.
    certified = gate.pending if gate.recipes is None and gate.pending is not None else gate.verified
    return None if certified is None else certified.step
