"""What a cell has shown, how results are stored and summed up."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchscout.campaign.cell import LAYOUTS, Cell, Hardware, Row
from torchscout.campaign.grading import Flaw, Grade
from torchscout.decision.record import Incident
from torchscout.decision.recorder import Stamped

__all__ = [
    "Found",
    "Result",
    "RowSummary",
    "Store",
    "as_report",
    "found_in",
    "interval",
    "percentile",
    "summarized",
]


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


_QUANTILE = 1.959963984540054
"""Of the normal distribution, for 95 %."""


def interval(passed: int, total: int) -> tuple[float, float]:
    """Wilson's score interval, 95 %: between which shares the true one may lie, also where all passed."""
    if total == 0:
        return 0.0, 1.0
    share, squared = passed / total, _QUANTILE**2
    middle = share + squared / (2 * total)
    reach = _QUANTILE * math.sqrt(share * (1 - share) / total + squared / (4 * total**2))
    scale = 1 + squared / total
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def percentile(values: Sequence[float], share: float) -> float | None:
    """By nearest rank; None where there are no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


_SCHEMA = 1
_DEFAULT = Hardware()


class Store:
    """``results.jsonl`` in a campaign's folder: a line about the campaign, then one for each cell.

    A cell that was run again has several; the last one counts.
    """

    def __init__(self, folder: Path, campaign: str, seed: int, hardware: Hardware = _DEFAULT) -> None:
        """A ``ValueError`` where the folder holds another campaign, or what cannot be read."""
        self.folder = folder
        self.path = folder / "results.jsonl"
        self.results: dict[str, Result] = {}
        """By the cell's identity."""
        head = {"schema": _SCHEMA, "campaign": campaign, "seed": seed}
        if hardware.device != "cpu":  # else as it always was
            head |= {"device": hardware.device, "backend": hardware.backend}
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size:
            self._read(head)
        else:
            self._write(head)

    def add(self, result: Result) -> None:
        self.results[result.cell] = result
        self._write(result.to_json())

    def summaries(self, rows: Sequence[Row], cells: Sequence[Cell]) -> tuple[list[RowSummary], list[Result]]:
        """The table of these cells as far as they are done, and their results."""
        done = [self.results[cell.identity] for cell in cells if cell.identity in self.results]
        return summarized(rows, cells, self.results), done

    def _read(self, head: dict[str, Any]) -> None:
        whole = self.path.read_bytes()
        *lines, rest = whole.split(b"\n")
        if rest:  # cut short in the middle of a line, whose cell is run again
            os.truncate(self.path, len(whole) - len(rest))
        for number, line in enumerate(lines, start=1):
            try:
                document = json.loads(line)
                if number > 1:
                    self.results[document["cell"]] = Result.from_json(document)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self.path}:{number} is not a campaign's: {error!r}") from error
            if number == 1 and document != head:
                raise ValueError(
                    f"{self.path} belongs to another campaign, {document}; this one is {head}. "
                    "Choose another folder, or the same campaign, seed, device and backend"
                )

    def _write(self, document: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(document) + "\n")


@dataclass(frozen=True, slots=True)
class RowSummary:
    row: Row
    cells: int
    """That were asked for."""
    run: int
    passed: int
    ranks: tuple[int, ...]
    """How many each of its jobs has."""
    reduced: tuple[str, ...]
    """Which jobs have fewer ranks here than in the campaign, as ``HSDP 2x2 on 4 ranks for HSDP 4x4 on 16``,
    and in how many cells less is to be named therefore."""
    false_alarms: int
    """Cells in which more was reported than was wrong."""
    wrong_names: int
    """Cells in which something else was."""
    missed: int
    """Cells in which nothing was, though something was wrong."""
    seconds: Sequence[float]
    """From fault to incident, of each cell that has both."""

    @property
    def interval(self) -> tuple[float, float]:
        """Of the share that passes, 95 %."""
        return interval(self.passed, self.run)

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "row": self.row.key,
            "title": self.row.title,
            "trigger": self.row.trigger,
            "ranks": list(self.ranks),
            "reduced": list(self.reduced),
            "cells": self.cells,
            "run": self.run,
            "passed": self.passed,
            "interval": [low, high] if self.run else None,
            "false_alarms": self.false_alarms,
            "wrong_names": self.wrong_names,
            "missed": self.missed,
            "seconds_median": percentile(self.seconds, 0.5),
            "seconds_p95": percentile(self.seconds, 0.95),
        }


def summarized(rows: Iterable[Row], cells: Sequence[Cell], results: Mapping[str, Result]) -> list[RowSummary]:
    """One for each row of which cells are wanted."""
    found = []
    for row in rows:
        wanted = [cell for cell in cells if cell.row == row.key]
        if wanted:
            found.append(
                _summary(row, wanted, [results[each.identity] for each in wanted if each.identity in results])
            )
    return found


def as_report(
    campaign: str, seed: int, summaries: Sequence[RowSummary], results: Sequence[Result]
) -> dict[str, Any]:
    """One document: the table, each cell that failed, and whether all have passed."""
    return {
        "campaign": campaign,
        "seed": seed,
        "passed": all(each.grade.passed for each in results),
        "complete": all(each.run == each.cells for each in summaries),
        "took_seconds": sum(each.took_seconds for each in results),
        "rows": [each.to_json() for each in summaries],
        "failed": [each.to_json() for each in results if not each.grade.passed],
    }


def _reduced(cell: Cell) -> str:
    """Nothing where its ranks are as many as planned."""
    planned, here = LAYOUTS[cell.layout], cell.place
    if planned.ranks == here.ranks:
        return ""
    return f"{here.title} on {here.ranks} ranks for {planned.title} on {planned.ranks}"


def _coarser(cells: Sequence[Cell]) -> list[str]:
    counted = Counter(cell.coarser for cell in cells if cell.coarser)
    return [
        f"in {count} of {len(cells)} cells the right answer is a {what}" for what, count in counted.items()
    ]


def _summary(row: Row, cells: Sequence[Cell], results: Sequence[Result]) -> RowSummary:
    flaws = [each.grade.flaw for each in results]
    return RowSummary(
        row,
        len(cells),
        len(results),
        sum(each.grade.passed for each in results),
        tuple(sorted({cell.place.ranks for cell in cells})),
        (*dict.fromkeys(filter(None, map(_reduced, cells))), *_coarser(cells)),
        flaws.count(Flaw.FALSE_ALARM),
        flaws.count(Flaw.WRONG_NAME),
        flaws.count(Flaw.MISSED),
        [each.seconds for each in results if each.seconds is not None],
    )
