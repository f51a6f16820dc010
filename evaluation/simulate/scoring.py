"""Compares what was decided with what is true."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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

    def named(self, ranks: Collection[int]) -> bool:
        """Whether all of ``ranks`` may be named."""
        return (self.ranks | self.also | self.lost).issuperset(ranks)


@dataclass(frozen=True, slots=True)
class Score:
    outcome: Outcome
    healthy_alone: bool = False
    """A single healthy rank was named."""
    sentence: str = ""
    """What was said, unless it was right."""


def score(truth: Truth, incidents: Sequence[Incident]) -> Score:
    """Score the incidents of one scenario: one wrong incident makes it wrong."""
    for incident in incidents:
        if not _is_possible(truth, incident):
            is_alone = len(incident.ranks) == 1 and _is_precise(incident)
            return Score(Outcome.WRONG, is_alone and not truth.named(incident.ranks), incident.sentence)
    needed = truth.ranks | truth.group
    if not incidents and needed:
        return Score(Outcome.INCONCLUSIVE, sentence="nothing was reported")
    are_exact = all(_is_precise(each) != bool(truth.group) for each in incidents)
    named = {rank for each in incidents for rank in each.ranks}
    if are_exact and needed <= named and truth.named(named - truth.group):
        return Score(Outcome.RIGHT)
    return Score(Outcome.INCONCLUSIVE, sentence=incidents[0].sentence)


def _is_precise(incident: Incident) -> bool:
    """Whether it names ranks, rather than a group that contains them."""
    return incident.scope in (Scope.RANK, Scope.MACHINE)


def _is_possible(truth: Truth, incident: Incident) -> bool:
    if not truth.ranks | truth.group | truth.also:
        return False  # nobody waits, not even for a lost machine
    if not _is_precise(incident):
        faulty = truth.ranks | truth.group | truth.also | truth.lost
        return incident.scope is Scope.JOB or not faulty.isdisjoint(incident.ranks)
    is_lost = incident.manifestation is Manifestation.HANG and incident.action is Action.REPLACE
    return truth.lost.issuperset(incident.ranks) if is_lost else truth.named(incident.ranks)
