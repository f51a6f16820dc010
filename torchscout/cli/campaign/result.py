"""What came of a cell, as it is kept and shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.grading import Flaw, Grade
from torchscout.decision.record import Incident
from torchscout.decision.recorder import Stamped

__all__ = ["Found", "Result", "found_in"]


@dataclass(frozen=True, slots=True)
class Found:
    """An incident, in what a cell is graded by."""

    manifestation: str
    scope: str
    ranks: tuple[int, ...]
    surface: str
    step: int
    sentence: str

    @classmethod
    def of(cls, incident: Incident) -> Found:
        return cls(
            incident.manifestation.value,
            incident.scope.value,
            incident.ranks,
            incident.records[0].surface,
            incident.step,
            incident.sentence,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A cell's."""

    cell: str
    """Its identity."""
    row: str
    is_clean: bool
    """Whether nothing is wrong, and nothing must be reported."""
    grade: Grade
    seconds: float | None = None
    """From the fault to the incident that names it; None where there was neither."""
    took_seconds: float = 0.0
    found: tuple[Found, ...] = ()
    detail: str = ""
    """What else is worth knowing."""
    ablated: Mapping[str, str] = field(default_factory=dict)
    """What was decided without a piece of the method: see ``ablation``."""
    ranks: int = 0
    """How many its job had; 0 for results that were kept before this was."""
    device: str = "cpu"
    backend: str = "gloo"

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        grade = document.pop("grade")
        flaw = None if self.grade.flaw is None else self.grade.flaw.value
        return {**document, "passed": self.grade.passed, "flaw": flaw, "reason": grade["reason"]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Result:
        """``ValueError``, ``KeyError`` or ``TypeError`` where it is none."""
        flaw = None if document["flaw"] is None else Flaw(document["flaw"])
        found = [Found(**{**each, "ranks": tuple(each["ranks"])}) for each in document["found"]]
        return cls(
            document["cell"],
            document["row"],
            document["is_clean"],
            Grade(flaw, document["reason"]),
            document["seconds"],
            document["took_seconds"],
            tuple(found),
            document["detail"],
            document["ablated"],
            document.get("ranks", 0),
            document.get("device", "cpu"),
            document.get("backend", "gloo"),
        )


def found_in(
    cell: Cell,
    grade: Grade,
    reports: Sequence[Stamped],
    *,
    happened: float | None,
    took_seconds: float,
    detail: str = "",
) -> Result:
    """``happened`` is when the first fault did, and ``reports`` what was written down, by the same clock."""
    incidents = [each for each in reports if isinstance(each.item, Incident)]
    named = [
        each.monotonic
        for each in incidents
        if isinstance(each.item, Incident) and any(truth.is_told_by(each.item) for truth in cell.truths)
    ]
    return Result(
        cell.identity,
        cell.row,
        not cell.truths,
        grade,
        max(0.0, min(named) - happened) if named and happened is not None else None,
        took_seconds,
        tuple(Found.of(each.item) for each in incidents if isinstance(each.item, Incident)),
        detail,
        ranks=cell.place.ranks,
        device=cell.place.device,
        backend=cell.place.backend,
    )
