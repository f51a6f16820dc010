"""Reads a run directory: what is damaged or foreign is noted, and the rest is used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchscout.decision.records.recorder import (
    HISTORY_FILE,
    INCIDENTS_FILE,
    RECORDS_FOLDER,
    Agreements,
    IncidentLog,
    Problem,
    Stamped,
    Started,
    Trust,
    read,
)
from torchscout.decision.types import Decision, EvidenceRecord, Incident, Resolved
from torchscout.observer.record.directory import End, RankEntry, read_ends, read_roster_entries
from torchscout.report.comparisons import Comparisons

__all__ = [
    "MOST_PROBLEMS",
    "Reported",
    "Run",
    "is_run",
    "joined",
    "read_events",
    "read_ranks",
    "read_records",
    "read_run",
]

MOST_PROBLEMS = 200
"""Problems that are kept in words; further ones are counted."""


_MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Reported:
    """An incident, and when it was written."""

    incident: Incident
    time: float
    end: Resolved | None


@dataclass(slots=True)
class Run:
    """What the files of a run directory contain."""

    run_dir: str
    entries: list[RankEntry] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    """Those of the sessions in ``entries``; the end of an earlier session of a rank is out of date."""
    incidents: list[Reported] = field(default_factory=list)
    resolved: list[tuple[float, Resolved]] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    starts: list[tuple[float, Started]] = field(default_factory=list)
    trust: list[tuple[float, Trust]] = field(default_factory=list)
    comparisons: Comparisons = field(default_factory=Comparisons)
    with_records: set[int] = field(default_factory=set)
    """Ranks with a file of records."""
    problems: list[str] = field(default_factory=list)
    unlisted: int = 0
    """Problems beyond ``MOST_PROBLEMS``."""

    def note(self, problem: object) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(str(problem))
        else:
            self.unlisted += 1


def _are_possible(*ranks: int) -> bool:
    """Whether a job may have these ranks: what is shown grows with the largest one."""
    return all(0 <= rank < _MOST_RANKS for rank in ranks)


def _is_possible(item: Any) -> bool:
    several = [item, *getattr(item, "records", ())]
    return all(_are_possible(*getattr(each, name, ())) for each in several for name in ("ranks", "peers"))


def is_run(run_dir: Path) -> bool:
    """Whether this folder has any file that a run writes."""
    names = (INCIDENTS_FILE, HISTORY_FILE, RECORDS_FOLDER, "ranks")
    return any((run_dir / name).exists() for name in names)


def read_run(run_dir: Path) -> Run:
    """Read all files of a run directory; what cannot be read is in ``Run.problems``."""
    return joined(str(run_dir), read_ranks(run_dir), read_events(run_dir), read_records(run_dir))


def joined(run_dir: str, ranks: Run, events: Run, records: Run) -> Run:
    """Return one run of the parts that ``read_ranks``, ``read_events`` and ``read_records`` have read."""
    run = replace(events, run_dir=run_dir, entries=ranks.entries, ends=ranks.ends, problems=[], unlisted=0)
    run.with_records = records.with_records
    of_incidents = [each for reported in events.incidents for each in reported.incident.records]
    run.comparisons = records.comparisons.with_times(of_incidents)
    for part in (ranks, events, records):
        for problem in part.problems:
            run.note(problem)
        run.unlisted += part.unlisted
    return run


def read_events(run_dir: Path) -> Run:
    """Read incidents, decisions, starts, and which checkpoints could be trusted."""
    run = Run(str(run_dir))
    _read_incidents(run, run_dir / INCIDENTS_FILE)
    for line in _lines(run, run_dir / HISTORY_FILE):
        if isinstance(line.item, Started):
            run.starts.append((line.time, line.item))
        elif isinstance(line.item, Trust):
            run.trust.append((line.time, line.item))
    return run


def read_records(run_dir: Path) -> Run:
    """Read the records of all ranks, which takes long in a large job."""
    run = Run(str(run_dir))
    for rank, path in sorted(_records(run, run_dir / RECORDS_FOLDER).items()):
        run.with_records.add(rank)
        run.comparisons.add_rank(
            line.item for line in _lines(run, path) if isinstance(line.item, EvidenceRecord | Agreements)
        )
    return run


def read_ranks(run_dir: Path) -> Run:
    """Read where each rank runs, and how it ended."""
    run = Run(str(run_dir))
    try:
        for entry in read_roster_entries(run_dir):
            if isinstance(entry, ValueError):
                run.note(entry)
            elif not _are_possible(entry.rank, entry.size, *entry.address):
                run.note(f"rank {entry.rank} of {entry.size}: this entry of the roster is left out")
            else:
                run.entries.append(entry)
        records = {entry.rank: entry.record for entry in run.entries}
        ends = read_ends(run_dir).values()
        run.ends = [end for end in ends if records.get(end.rank) == end.record]
    except OSError as error:
        run.note(error)
    run.entries.sort(key=lambda entry: entry.rank)
    return run


def _read_incidents(run: Run, path: Path) -> None:
    log, times = IncidentLog(path.parent), []
    for line in _lines(run, path):
        log.add(line.item)
        if isinstance(line.item, Incident):
            times.append(line.time)
        elif isinstance(line.item, Resolved):
            run.resolved.append((line.time, line.item))
        elif isinstance(line.item, Decision):
            run.decisions.append((line.time, line.item))
    if log.left_out:
        run.note(
            f"{path}: {log.left_out} older incidents, ends of incidents and decisions are left out; "
            "the first of each kind are kept"
        )
    run.incidents = [
        Reported(incident, time, end) for (incident, end), time in zip(log.entries, times, strict=True)
    ]


def _records(run: Run, folder: Path) -> dict[int, Path]:
    """The files of records by rank; a rank may have only the previous, full one."""
    found: dict[int, Path] = {}
    try:
        for path in folder.iterdir() if folder.is_dir() else ():
            name = path.name.removesuffix(".1")
            rank = name.removeprefix("rank-").removesuffix(".jsonl")
            if rank.isdecimal() and name == f"rank-{rank}.jsonl":
                found[int(rank)] = folder / name
    except OSError as error:
        run.note(error)
    return found


def _lines(run: Run, path: Path) -> Iterator[Stamped]:
    try:
        for line in read(path):
            if isinstance(line, Problem):
                run.note(line)
            elif not (math.isfinite(line.time) and _is_possible(line.item)):
                run.note(f"{path}: the time or a rank is not what a recorder writes; the line is left out")
            else:
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        run.note(error)
