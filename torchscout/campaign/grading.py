"""Decides whether the incidents of a run are right."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from torchscout.decision.types import Incident
from torchscout.faults.fault import Fault
from torchscout.faults.ground_truth import GroundTruth
from torchscout.utils.text import listed, named

__all__ = ["Flaw", "Grade", "grade", "unfired"]


class Flaw(str, Enum):
    """Why a cell has failed."""

    BROKEN = "broken"
    """Its ranks, or SCOUT itself, failed."""
    NOT_INJECTED = "not_injected"
    """A fault did not happen, so the cell shows nothing."""
    MISSED = "missed"
    """Nothing was reported."""
    WRONG_NAME = "wrong_name"
    """Something else was reported than is wrong."""
    FALSE_ALARM = "false_alarm"
    """More was reported than is wrong."""
    NOT_RECOVERED = "not_recovered"
    """The fault was found, but the job did not resume from the right state."""


@dataclass(frozen=True, slots=True)
class Grade:
    flaw: Flaw | None = None
    """None if the cell has passed."""
    reason: str = ""
    """One sentence about the flaw."""

    @property
    def passed(self) -> bool:
        return self.flaw is None


def grade(
    truths: Sequence[GroundTruth],
    *,
    unfired: Sequence[str] = (),
    incidents: Sequence[Incident] = (),
    failures: Sequence[str] = (),
) -> Grade:
    """Compare incidents with the truth; ``unfired`` faults did not happen, ``failures`` are SCOUT's own."""
    if unfired:
        return Grade(Flaw.NOT_INJECTED, f"not injected: {listed(unfired)} did not happen")
    if failures:
        return Grade(Flaw.BROKEN, f"the check itself failed: {failures[0]}")
    if truths and not incidents:
        return Grade(Flaw.MISSED, f"nothing was reported of {_wanted(truths[0])}")
    left = list(incidents)
    for truth in truths:
        matching = next((each for each in left if truth.matches(each)), None)
        if matching is None:
            return Grade(Flaw.WRONG_NAME, _difference(truth, left))
        left.remove(matching)
    if left:
        return Grade(Flaw.FALSE_ALARM, f"{'also ' if truths else ''}reported: {_found(left[0])}")
    return Grade()


def unfired(faults: Iterable[Fault], happened: Collection[tuple[int, str]]) -> list[str]:
    """Describe the faults that did not happen; ``happened`` are ranks and places."""
    missing = [fault for fault in faults if (fault.rank, fault.at) not in happened]
    return [f"the fault of rank {fault.rank} at {fault.at}" for fault in missing]


def _difference(truth: GroundTruth, incidents: Sequence[Incident]) -> str:
    """What is wrong about the incident that comes nearest to the truth."""
    if not incidents:
        return f"nothing was reported of {_wanted(truth)}"
    nearest = min(incidents, key=lambda each: len(_wrong(truth, each)))
    return f"wrong {listed(_wrong(truth, nearest))}: {_wanted(truth)} was reported as {_found(nearest)}"


def _wrong(truth: GroundTruth, incident: Incident) -> list[str]:
    right = {
        "manifestation": incident.manifestation is truth.manifestation,
        "ranks": incident.ranks == truth.ranks,
        "scope": incident.scope is truth.scope,
        "surface": fnmatchcase(incident.records[0].surface, truth.surface),
    }
    return [aspect for aspect, is_right in right.items() if not is_right]


def _wanted(truth: GroundTruth) -> str:
    return f"{truth.manifestation.value} of {_ranks(truth.ranks)} ({truth.scope.value}) in {truth.surface}"


def _found(incident: Incident) -> str:
    return (
        f"{incident.manifestation.value} of {_ranks(incident.ranks)} ({incident.scope.value}) "
        f"in {incident.records[0].surface} at step {incident.step}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return named(ranks) if ranks else "nobody"
