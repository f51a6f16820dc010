"""Compares what was decided with what is true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torchscout.decision.types import Action, Incident, Manifestation, Scope

__all__ = ["Outcome", "Score", "Truth", "score"]


class Outcome(str, Enum):
    RIGHT = "right"
    """Exactly what is wrong was named, or nothing where nothing is wrong."""
    WRONG = "wrong"
    """A healthy rank, machine or group was named."""
    INCONCLUSIVE = "inconclusive"
    """Nothing was named, only a part, or a group that contains what is wrong."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What is wrong in a scenario; nothing if both ``ranks`` and ``group`` are empty."""

    ranks: frozenset[int] = frozenset()
    """The faulty ranks that the evidence can show."""
    group: frozenset[int] = frozenset()
    """The members of a group at fault, none of which may be named alone."""
    also: frozenset[int] = frozenset()
    """Further faulty ranks, which need not be named: no rank waits for them."""
    lost: frozenset[int] = frozenset()
    """Ranks of machines that nobody can reach: because of a hang only these are replaced."""


@dataclass(frozen=True, slots=True)
class Score:
    outcome: Outcome
    healthy_alone: bool = False
    """A single healthy rank was named."""
    sentence: str = ""
    """What was said, unless it was right."""


def score(truth: Truth, incidents: Sequence[Incident]) -> Score:
    """Score the incidents of one scenario: one wrong incident makes it wrong."""
    if not incidents and not truth.ranks and not truth.group:
        return Score(Outcome.RIGHT)
    if not incidents:
        return Score(Outcome.INCONCLUSIVE, sentence="nothing was reported")
    for incident in incidents:
        if not _is_possible(truth, incident):
            return _wrong(truth, incident)
    exact = [each for each in incidents if _is_precise(each) == (not truth.group)]
    named = {rank for each in exact for rank in each.ranks}
    if (
        len(exact) == len(incidents)
        and truth.ranks | truth.group <= named <= truth.ranks | truth.group | truth.also | truth.lost
    ):
        return Score(Outcome.RIGHT)
    return Score(Outcome.INCONCLUSIVE, sentence=incidents[0].sentence)


def _is_precise(incident: Incident) -> bool:
    """Whether it names ranks, rather than a group that contains them."""
    return incident.scope in (Scope.RANK, Scope.MACHINE)


def _is_possible(truth: Truth, incident: Incident) -> bool:
    if not truth.ranks | truth.group | truth.also:
        return False  # nobody waits, not even for a lost machine
    named, faulty = set(incident.ranks), truth.ranks | truth.also | truth.lost
    if not _is_precise(incident):
        return incident.scope is Scope.JOB or bool(named & (faulty | truth.group))
    is_lost = incident.manifestation is Manifestation.HANG and incident.action is Action.REPLACE
    return named <= (truth.lost if is_lost else faulty)


def _wrong(truth: Truth, incident: Incident) -> Score:
    alone = _is_precise(incident) and len(incident.ranks) == 1
    return Score(
        Outcome.WRONG,
        alone and incident.ranks[0] not in truth.ranks | truth.also | truth.lost,
        incident.sentence,
    )
