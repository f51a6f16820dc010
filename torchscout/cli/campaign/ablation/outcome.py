"""What a decision amounts to, with or without a piece of the method. Pure.

Only manifestation and ranks are looked at: a decision that lacks a piece need not know of surfaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from torchscout.decision.record import Incident, Manifestation
from torchscout.faults.ground_truth import GroundTruth

__all__ = ["Claim", "Outcome", "claims_of", "judged"]


class Outcome(str, Enum):
    RIGHT = "right"
    """Exactly those are named that are at fault, or nobody where nobody is."""
    WRONG = "wrong"
    """Others are named, or others too."""
    MISSED = "missed"
    FALSE_ALARM = "false_alarm"
    """Somebody is named, and nothing is wrong."""


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """Who is named, for what."""

    manifestation: Manifestation
    ranks: tuple[int, ...]


def claims_of(incidents: Iterable[Incident]) -> set[Claim]:
    return {Claim(each.manifestation, each.ranks) for each in incidents}


def judged(truths: Sequence[GroundTruth], claims: Iterable[Claim]) -> Outcome:
    wanted, told = {Claim(each.manifestation, each.ranks) for each in truths}, set(claims)
    if told == wanted:
        return Outcome.RIGHT
    if not told:
        return Outcome.MISSED
    return Outcome.WRONG if wanted else Outcome.FALSE_ALARM
