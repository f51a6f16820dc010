"""The end of the demo, as a document and as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from torchscout.checkpoint.selection import SweepResult
from torchscout.cli.columns import wrapped
from torchscout.cli.demo.lives import Life, Played
from torchscout.decision.record import Incident

__all__ = ["report_of", "screen"]

_SWEPT = {
    SweepResult.CLEAN: "before it went on, every layer and update was replayed: clean",
    SweepResult.SDC: "before it went on, every layer and update was replayed: corruption",
    SweepResult.COULD_NOT_RUN: "before it went on, not every layer and update could be replayed",
}


def report_of(played: Played, run_dir: Path) -> dict[str, Any]:
    """What was done to the job, what was found, and whether the two are the same."""
    return {
        "exact": played.grade.passed,
        "reason": played.grade.reason,
        "recovered": played.recovered,
        "injected": played.fired,
        "incidents": [each.to_json() for each in played.incidents],
        "lives": [asdict(each) for each in played.lives],
        "status": played.status,
        "run_dir": str(run_dir),
    }


def screen(played: Played, run_dir: Path) -> str:
    lines = ["", *_injected(played.fired)]
    for incident in played.incidents:
        lines += _named(incident)
    if not played.incidents:
        lines.append("named      nobody: the replicas agreed on all they computed and held")
    lines += _checked(played)
    lines += [line for life in played.lives for line in _lived(life)]
    lines.append(f"evidence   {run_dir}/incidents.jsonl and records/")
    outcome = "Exactly what was injected was named."
    if not played.grade.passed:
        outcome = f"This is NOT what was injected: {played.grade.reason}."
    state = "The job ended with bitwise the state of one that was never disturbed."
    if not played.recovered:
        state = "The job did NOT end with the state of one that was never disturbed."
    return "\n".join(map(wrapped, [*lines, "", outcome, state]))


def _injected(fired: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A fault that repeats is told once."""
    by_rank = sorted(fired, key=lambda each: (each["detail"], each["rank"], each["step"]))
    found = []
    for (detail, rank), alike in groupby(by_rank, lambda each: (each["detail"], each["rank"])):
        each = list(alike)
        first, last = each[0]["step"], each[-1]["step"]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        places = sorted({one["at"] for one in each})
        place = places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}"
        found.append((first, f"injected   {steps}, rank {rank}, {place}: {detail}"))
    return (line for _, line in sorted(found))


def _named(incident: Incident) -> list[str]:
    named = ", ".join(f"rank {rank}" for rank in incident.ranks)
    record = incident.records[0]
    what = f"{incident.manifestation.value} of {named}"
    lines = [f"named      step {incident.step}, {what}, {record.surface}", f"           {incident.sentence}"]
    if record.verdict is not None and len(record.peers) == len(record.verdict.evidence):
        votes = zip(record.peers, record.verdict.evidence, strict=True)
        lines += [f"           rank {peer}: {_shown(value)}" for peer, value in votes]
    return lines


def _shown(value: Any) -> str:
    return f"{value:.1f} ms" if isinstance(value, float) else str(value)


def _checked(played: Played) -> list[str]:
    if not played.status:
        return []
    replay = played.status["replay"]
    visited = {name: each for name, each in replay["coverage"].items() if not name.endswith("census")}
    checked = ", ".join(f"{each['targets']} {name}" for name, each in visited.items())
    return [f"checked    after every step: all state, and in turn {checked}"]


def _lived(life: Life) -> list[str]:
    began = life.resumed["step"]
    lines = []
    if began:
        lines.append(f"resumed    after step {began}: {life.resumed['reason']}")
    if life.resumed["swept"]:
        lines.append(f"swept      {_SWEPT[life.resumed['swept']]}")
    losses = " ".join(f"{loss:.2f}" for loss in life.losses)
    ends = {"finished": "to the end", "corrupted": "until it was found corrupt", "hung": "until it hung"}
    lines.append(f"trained    from step {began + 1} {ends[life.end]}; loss {losses}")
    return lines
