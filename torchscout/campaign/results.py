"""Results of cells: how they are made, stored and summed up."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchscout.campaign.cells.cell import LAYOUTS, Cell, Hardware, Row
from torchscout.campaign.grading import Flaw, Grade, grade
from torchscout.decision.types import Incident
from torchscout.faults.injector import Firing
from torchscout.run.reader import Stamped

__all__ = ["Found", "Result", "Store", "as_report", "graded", "interval", "percentile", "summarized"]

_REASON_CHARACTERS = 600


@dataclass(frozen=True, slots=True)
class Found:
    """The parts of an incident that a cell is graded by."""

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
    """The result of one cell."""

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
    """What was decided without a component of the method: see ``ablation``."""
    ranks: int = 0
    """How many ranks its job had; 0 in results of versions that did not store it."""
    device: str = "cpu"
    backend: str = "gloo"

    @classmethod
    def of(cls, cell: Cell, grade: Grade, took_seconds: float, **rest: Any) -> Result:
        """A result of ``cell`` on the hardware it ran on; ``rest`` are further fields."""
        place = cell.place
        rest |= {"ranks": place.ranks, "device": place.device, "backend": place.backend}
        return cls(cell.identity, cell.row, not cell.truths, grade, took_seconds=took_seconds, **rest)

    @classmethod
    def broken(cls, cell: Cell, reason: str, error: str, took_seconds: float) -> Result:
        """A cell whose processes failed."""
        grade = Grade(Flaw.BROKEN, f"{reason}: {error[:_REASON_CHARACTERS]}")
        return cls.of(cell, grade, took_seconds)

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        del document["grade"]
        flaw = None if self.grade.flaw is None else self.grade.flaw.value
        return {**document, "passed": self.grade.passed, "flaw": flaw, "reason": self.grade.reason}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Result:
        """Raises ``ValueError``, ``KeyError`` or ``TypeError`` for anything else than a result."""
        fields = {key: value for key, value in document.items() if key not in ("passed", "flaw", "reason")}
        flaw = None if document["flaw"] is None else Flaw(document["flaw"])
        found = [Found(**{**each, "ranks": tuple(each["ranks"])}) for each in document["found"]]
        return cls(**{**fields, "grade": Grade(flaw, document["reason"]), "found": tuple(found)})


def graded(
    cell: Cell,
    reports: Sequence[Stamped],
    fired: Sequence[Firing],
    took_seconds: float,
    *,
    unfired: Sequence[str],
    failures: Iterable[str] = (),
    further: Callable[[Sequence[Incident]], Grade] | None = None,
) -> Result:
    """Grade a cell by what was reported and what was injected.

    ``further`` checks what is particular to a kind of cell, given the incidents, once all else is right.
    """
    incidents = [(each.monotonic, each.item) for each in reports if isinstance(each.item, Incident)]
    problems = [each[:_REASON_CHARACTERS] for each in failures]
    items = [item for _, item in incidents]
    given = grade(cell.truths, unfired=unfired, incidents=items, failures=problems)
    if given.passed and further is not None:
        given = further(items)
    named = [time for time, item in incidents if any(truth.matches(item) for truth in cell.truths)]
    return Result.of(
        cell,
        given,
        took_seconds,
        seconds=max(0.0, min(named) - min(each.monotonic for each in fired)) if named and fired else None,
        found=tuple(map(Found.of, items)),
        detail=fired[0].detail if fired else "",
    )


_QUANTILE = 1.959963984540054
"""Of the normal distribution, for 95 %."""


def interval(passed: int, total: int) -> tuple[float, float]:
    """Wilson's score interval for the true share, at 95 %; not empty even where all have passed."""
    if total == 0:
        return 0.0, 1.0
    share, squared = passed / total, _QUANTILE**2
    middle = share + squared / (2 * total)
    reach = _QUANTILE * math.sqrt(share * (1 - share) / total + squared / (4 * total**2))
    scale = 1 + squared / total
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The percentile by nearest rank; None if there are no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


_SCHEMA = 1
_DEFAULT = Hardware()


class Store:
    """``results.jsonl`` in a campaign's folder: a line about the campaign, then one for each result.

    A cell that was run again has several results; the last one counts.
    """

    def __init__(self, folder: Path, campaign: str, seed: int, hardware: Hardware = _DEFAULT) -> None:
        """Raises ``ValueError`` if the folder holds another campaign, or cannot be read."""
        self.folder = folder
        self.path = folder / "results.jsonl"
        self.results: dict[str, Result] = {}
        """By the cell's identity."""
        head = {"schema": _SCHEMA, "campaign": campaign, "seed": seed}
        if hardware.device != "cpu":  # CPU campaigns of earlier versions stay readable
            head |= {"device": hardware.device, "backend": hardware.backend}
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size:
            self._read(head)
        else:
            self._write(head)

    def add(self, result: Result) -> None:
        self.results[result.cell] = result
        self._write(result.to_json())

    def _read(self, head: dict[str, Any]) -> None:
        whole = self.path.read_bytes()
        *lines, rest = whole.split(b"\n")
        if rest:  # the last line is incomplete: its cell is run again
            os.truncate(self.path, len(whole) - len(rest))
        for number, line in enumerate(lines, start=1):
            try:
                document = json.loads(line)
                if number > 1:
                    self.results[document["cell"]] = Result.from_json(document)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self.path}:{number} is not a campaign's result: {error!r}") from error
            if number == 1 and document != head:
                raise ValueError(
                    f"{self.path} belongs to another campaign, {document}; this one is {head}. "
                    "Choose another folder, or use the same campaign, seed, device and backend"
                )

    def _write(self, document: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(document) + "\n")


def summarized(
    rows: Iterable[Row], cells: Sequence[Cell], results: Mapping[str, Result]
) -> list[dict[str, Any]]:
    """The table's rows as JSON, one for each row that ``cells`` belong to; ``results`` by identity."""
    found = []
    for row in rows:
        wanted = [cell for cell in cells if cell.row == row.key]
        done = [results[cell.identity] for cell in wanted if cell.identity in results]
        if wanted:
            about = {"row": row.key, "title": row.title, "trigger": row.trigger}
            found.append({**about, **_figures(wanted, done)})
    return found


def _figures(cells: Sequence[Cell], results: Sequence[Result]) -> dict[str, Any]:
    flaws = Counter(each.grade.flaw for each in results)
    seconds = [each.seconds for each in results if each.seconds is not None]
    return {
        "ranks": sorted({cell.place.ranks for cell in cells}),
        "reduced": [*dict.fromkeys(filter(None, map(_reduced, cells))), *_coarser(cells)],
        "cells": len(cells),
        "run": len(results),
        "passed": flaws[None],
        "interval": list(interval(flaws[None], len(results))) if results else None,
        "false_alarms": flaws[Flaw.FALSE_ALARM],
        "wrong_names": flaws[Flaw.WRONG_NAME],
        "missed": flaws[Flaw.MISSED],
        "seconds_median": percentile(seconds, 0.5),
        "seconds_p95": percentile(seconds, 0.95),
    }


def _reduced(cell: Cell) -> str:
    """``HSDP 2x2 on 4 ranks for HSDP 4x4 on 16``; empty if the cell has as many ranks as planned."""
    planned, here = LAYOUTS[cell.layout], cell.place
    if planned.ranks == here.ranks:
        return ""
    return f"{here.title} on {here.ranks} ranks for {planned.title} on {planned.ranks}"


def _coarser(cells: Sequence[Cell]) -> list[str]:
    counted = Counter(cell.coarser for cell in cells if cell.coarser)
    return [
        f"in {count} of {len(cells)} cells the right answer is a {each}" for each, count in counted.items()
    ]


def as_report(
    campaign: str, seed: int, rows: Sequence[Mapping[str, Any]], results: Sequence[Result]
) -> dict[str, Any]:
    """One JSON document: the table, each cell that failed, and whether all have passed."""
    return {
        "campaign": campaign,
        "seed": seed,
        "passed": all(each.grade.passed for each in results),
        "complete": all(each["run"] == each["cells"] for each in rows),
        "took_seconds": sum(each.took_seconds for each in results),
        "rows": list(rows),
        "failed": [each.to_json() for each in results if not each.grade.passed],
    }
