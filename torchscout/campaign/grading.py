"""Reads the incidents of a run and decides whether they are right."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

from torchscout.decision.record import Incident
from torchscout.decision.recorder import Stamped, stamped
from torchscout.faults.fault import Fault
from torchscout.faults.ground_truth import GroundTruth
from torchscout.utils.text import listed, named

__all__ = ["Flaw", "Grade", "Reports", "Tail", "grade", "unfired"]


class Tail:
    """Reads a file of a run directory as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> list[Stamped]:
        """The complete lines that were added since the last call. Raises ``ValueError`` for invalid ones."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            *lines, _ = file.read().split(b"\n")
        self._read += sum(len(line) + 1 for line in lines)
        return [stamped(json.loads(line)) for line in lines if line]


class Reports:
    """Reads the incidents of a run directory as they are reported."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir / "incidents.jsonl")

    def new(self) -> list[Stamped]:
        """The incidents that were reported since the last call."""
        return [each for each in self._tail.new() if isinstance(each.item, Incident)]


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
