"""Reads a run directory, also that of a live run: what is damaged or foreign is noted, and the rest is used.

The files of several writers are merged. Machines that do not share a disk write the same incidents; copied
into one folder, each is there once.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torchscout.decision.types import (
    SCHEMA,
    Decision,
    Incident,
    Recordable,
    Resolved,
    Started,
    Trust,
    from_json,
)
from torchscout.run.folder import (
    HISTORY_FILE,
    INCIDENTS_FOLDER,
    RECORDS_FOLDER,
    REPLAY_FILE,
    RUNS_FILE,
    End,
    RankEntry,
    read_ends,
    read_heartbeat,
    read_roster_entries,
    read_unwatched,
)

__all__ = [
    "MOST_PROBLEMS",
    "Follower",
    "IncidentLog",
    "LastHeartbeat",
    "Problem",
    "Reported",
    "Run",
    "Stamped",
    "incident_lines",
    "is_run",
    "read",
    "read_run",
    "record_files",
    "runs_of",
]

MOST_PROBLEMS = 200
"""Problems that are kept in words; further ones are counted."""
_MOST_RANKS = 1 << 20
_MOST_INTERVALS = 3
"""A heartbeat that is as many intervals old says nothing any more."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """A line of a file, with the time at which it was written."""

    item: Recordable
    time: float
    """Wall clock, seconds since the epoch."""
    monotonic: float
    """The monotonic clock of the machine; comparable only within one boot."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that could not be read."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def read(path: Path | str) -> Iterator[Stamped | Problem]:
    """Yield every line of a file in order, beginning with its older parts; see ``run.writer``.

    A truncated or foreign line is a ``Problem``. Raises ``FileNotFoundError`` if there is no file.
    """
    with ExitStack() as opened:
        for each, file in _opened(Path(path), opened):
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parsed(each, number, line)


def incident_lines(run_dir: Path) -> list[Stamped | Problem]:
    """Return every line about incidents, of all writers, in the order of time; raises ``OSError``."""
    lines = [line for path in _line_files(run_dir / INCIDENTS_FOLDER) for line in read(path)]
    return sorted(lines, key=lambda line: line.time if isinstance(line, Stamped) else -math.inf)


def _opened(path: Path, opened: ExitStack) -> list[tuple[Path, BinaryIO]]:
    """Open all parts of a file, the oldest first. Raises ``FileNotFoundError`` if there is none."""
    found: list[tuple[Path, BinaryIO]] = []
    # The newest first: if it is renamed in between, it is found under both names and read once.
    for each in (path, path.with_name(f"{path.name}.2"), path.with_name(f"{path.name}.1")):
        with suppress(FileNotFoundError):
            file = opened.enter_context(each.open("rb"))
            if not any(os.path.sameopenfile(file.fileno(), other.fileno()) for _, other in found):
                found.append((each, file))
    if not found:
        raise FileNotFoundError(2, os.strerror(2), str(path))
    return found[::-1]


class Follower:
    """Reads a growing file, each line once, beginning with its older parts.

    A line that cannot be read is skipped or, if ``strict``, raises ``ValueError``.
    """

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        self._path, self._strict = path, strict
        self._file: BinaryIO | None = None  # open, so that no other file can get its number
        self._read, self._number = 0, 0
        """Bytes and lines so far."""

    def fresh(self) -> Iterator[Stamped]:
        """Yield what was added since the last call; an incomplete last line is left for the next one."""
        try:
            if self._file is None:
                yield from self._older()
            elif not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                yield from self._rest()  # it was full and is renamed, or it was removed
                self._begin(self._path.open("rb"))
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from self._rest()

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _begin(self, file: BinaryIO) -> None:
        self.close()
        self._file, self._read, self._number = file, 0, 0

    def _older(self) -> Iterator[Stamped]:
        """Yield what the older parts have, and begin with the newest one."""
        with ExitStack() as opened:
            *older, (_, newest) = _opened(self._path, opened)
            self._begin(os.fdopen(os.dup(newest.fileno()), "rb"))
            for path, file in older:
                for number, line in enumerate(file, start=1):
                    yield from self._items(path, number, line)

    def _rest(self) -> Iterator[Stamped]:
        if self._file is None:
            return
        self._file.seek(self._read)
        for line in self._file:
            if not line.endswith(b"\n"):
                return
            self._read, self._number = self._read + len(line), self._number + 1
            yield from self._items(self._path, self._number, line)

    def _items(self, path: Path, number: int, line: bytes) -> Iterator[Stamped]:
        found = _parsed(path, number, line) if line.strip() else None
        if isinstance(found, Stamped):
            yield found
        elif found is not None and self._strict:
            raise ValueError(str(found))


class IncidentLog:
    """The incidents of a run directory, of all writers; without their folder there are none."""

    def __init__(self, run_dir: Path | str, *, strict: bool = False) -> None:
        """``strict`` as in ``Follower``."""
        self._folder, self._strict = Path(run_dir) / INCIDENTS_FOLDER, strict
        self._files: dict[Path, Follower] = {}
        self.lines: dict[tuple[object, ...], Stamped] = {}
        """Each incident, end of an incident and decision, once. An end may be read before its incident, from
        another file."""

    @classmethod
    def read(cls, run_dir: Path | str) -> IncidentLog:
        """Return the log as it is now; raises ``OSError`` if it cannot be read."""
        log = cls(run_dir)
        log.new()
        for each in log._files.values():
            each.close()
        return log

    @property
    def entries(self) -> list[tuple[Incident, Resolved | None]]:
        """What has been read so far: each incident and how it ended, None while it is open."""
        return [(each.incident, each.end) for each in self.reported]

    @property
    def incidents(self) -> list[Incident]:
        return [each.incident for each in self.reported]

    @property
    def open_incidents(self) -> list[Incident]:
        return [incident for incident, end in self.entries if end is None]

    @property
    def reported(self) -> list[Reported]:
        ends = {each.item.incident: each.item for each in self.of(Resolved)}
        return [Reported(each.item, each.time, ends.get(each.item.id)) for each in self.of(Incident)]

    @property
    def decisions(self) -> list[Decision]:
        return [each.item for each in self.of(Decision)]

    def of(self, kind: type[Recordable]) -> list[Any]:
        """Return the lines of one kind."""
        return [line for line in self.lines.values() if isinstance(line.item, kind)]

    def new(self) -> list[Stamped]:
        """Read on, and return the incidents that were added since the last call."""
        for path in _line_files(self._folder):
            self._files.setdefault(path, Follower(path, strict=self._strict))
        lines = [line for each in self._files.values() for line in each.fresh()]
        lines.sort(key=lambda line: line.time)
        return [line for line in lines if self.add(line) and isinstance(line.item, Incident)]

    def add(self, line: Stamped) -> bool:
        """Add one line; return whether it is new."""
        match line.item:
            case Incident() as item:
                key: tuple[object, ...] = (Incident, item.id)
            case Resolved() as item:
                key = (Resolved, item.incident)
            case Decision() as item:
                key = (Decision, item.incident, item.step, item.sentence)
            case _:
                return False
        return self.lines.setdefault(key, line) is line


@dataclass(frozen=True, slots=True)
class Reported:
    """An incident, and when it was written."""

    incident: Incident
    time: float
    end: Resolved | None


class LastHeartbeat(NamedTuple):
    """The last heartbeat of a job."""

    step: int
    time: float
    """When it was written."""
    is_fresh: bool


@dataclass(slots=True)
class Run:
    """What a run directory says, but for its records, which take long to read in a large job."""

    run_dir: Path
    entries: list[RankEntry] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    """Those of the sessions in ``entries``; the end of an earlier session of a rank is out of date."""
    unwatched: list[int] = field(default_factory=list)
    """Ranks that are not watched for hangs any more."""
    incidents: list[Reported] = field(default_factory=list)
    resolved: list[tuple[float, Resolved]] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    starts: list[tuple[float, Started]] = field(default_factory=list)
    trust: list[tuple[float, Trust]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unlisted: int = 0
    """Problems beyond ``MOST_PROBLEMS``."""
    unread: str = ""
    """The first file or folder that could not be read at all."""

    @property
    def has_finished(self) -> bool:
        """Whether every rank is known to have finished."""
        finished = {end.rank for end in self.ends if end.how == "finished"}
        size = max((entry.size for entry in self.entries), default=0)
        return bool(finished) and finished >= {*range(size), *(entry.rank for entry in self.entries)}

    @property
    def began(self) -> float:
        """When the last rank entered itself: the beginning of the newest session. 0 if there was none."""
        try:
            return (self.run_dir / "ranks").stat().st_mtime
        except OSError:
            return 0.0

    def note(self, problem: object) -> None:
        self.unread = self.unread or (str(problem) if isinstance(problem, OSError) else "")
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(str(problem))
        else:
            self.unlisted += 1

    def lines(self, path: Path, found: Iterable[Stamped | Problem] | None = None) -> Iterator[Stamped]:
        """Yield the lines of a file that a writer may have written, and note all others."""
        try:
            for line in read(path) if found is None else found:
                if isinstance(line, Problem):
                    self.note(line)
                elif math.isfinite(line.time) and _is_possible(line.item):
                    yield line
                else:
                    self.note(f"{path}: no writer has such a time or rank; the line is left out")
        except FileNotFoundError:
            return
        except OSError as error:
            self.note(error)

    def read_ranks(self) -> None:
        """Read where each rank runs, and how it ended."""
        try:
            for entry in read_roster_entries(self.run_dir):
                if isinstance(entry, ValueError):
                    self.note(entry)
                elif not _are_possible(entry.rank, entry.size, *entry.address):
                    self.note(f"rank {entry.rank} of {entry.size}: this entry of the roster is left out")
                else:
                    self.entries.append(entry)
            records = {entry.rank: entry.record for entry in self.entries}
            ends = read_ends(self.run_dir).values()
            self.ends = [end for end in ends if records.get(end.rank) == end.record]
            self.unwatched = [rank for rank in read_unwatched(self.run_dir) if rank in records]
        except OSError as error:
            self.note(error)
        self.entries.sort(key=lambda entry: entry.rank)

    def read_events(self) -> None:
        """Read incidents, decisions, starts, and which checkpoints could be trusted."""
        log = IncidentLog(self.run_dir)
        try:
            found = incident_lines(self.run_dir)
        except OSError as error:
            self.note(error)
            found = []
        for line in self.lines(self.run_dir / INCIDENTS_FOLDER, found):
            log.add(line)
        self.incidents = log.reported
        self.resolved = [(line.time, line.item) for line in log.of(Resolved)]
        self.decisions = [(line.time, line.item) for line in log.of(Decision)]
        for line in self.lines(self.run_dir / HISTORY_FILE):
            if isinstance(line.item, Started):
                self.starts.append((line.time, line.item))
            elif isinstance(line.item, Trust):
                self.trust.append((line.time, line.item))

    def last_heartbeat(self) -> LastHeartbeat | None:
        """Return the last heartbeat of the present session; None if there is none. The time of the file is
        compared with the clock of this machine: where they differ very much, a heartbeat is not fresh."""
        found = read_heartbeat(self.run_dir)
        if found is None:
            return None
        beat, at = found
        if not any((entry.rank, entry.record) == (beat.rank, beat.record) for entry in self.entries):
            return None
        return LastHeartbeat(beat.step, at, abs(time.time() - at) < _MOST_INTERVALS * beat.interval)

    def replay(self) -> dict[str, Any] | None:
        """Return whether checks are on; None if they have never failed, or rank 0 could not write that."""
        try:
            found = json.loads((self.run_dir / REPLAY_FILE).read_text())
        except (OSError, ValueError):
            return None
        is_known = isinstance(found, dict) and isinstance(found.get("sentence"), str)
        return found if is_known else None


def read_run(run_dir: Path) -> Run:
    """Read everything but the records; what cannot be read is in ``Run.problems``."""
    run = Run(run_dir)
    run.read_ranks()
    run.read_events()
    return run


def runs_of(checkpoints: Path) -> list[Path]:
    """Return the run directories of the runs that have used a folder of checkpoints; raises ``OSError``."""
    found = dict[Path, None]()
    with suppress(FileNotFoundError):
        for line in (checkpoints / RUNS_FILE).read_text().splitlines():
            with suppress(ValueError):  # a line that a full disk has cut short
                if isinstance(run_dir := json.loads(line), str):
                    found[Path(run_dir)] = None
    return [*found]


def is_run(run_dir: Path) -> bool:
    """Whether this folder has any file that a run writes."""
    names = (INCIDENTS_FOLDER, HISTORY_FILE, RECORDS_FOLDER, "ranks")
    return any((run_dir / name).exists() for name in names)


def record_files(run_dir: Path) -> list[tuple[int, Path]]:
    """Return the files of records with their ranks; raises ``OSError``."""
    return sorted((int(path.stem.rpartition("-")[2]), path) for path in _line_files(run_dir / RECORDS_FOLDER))


def _line_files(folder: Path) -> list[Path]:
    """Return the files of all writers; a writer may have only an older part."""
    try:
        names = {path.name.removesuffix(".1").removesuffix(".2") for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names) if _is_of_a_writer(name)]


def _is_of_a_writer(name: str) -> bool:
    by, _, rank = name.removesuffix(".jsonl").rpartition("-")
    return name.endswith(".jsonl") and by in ("rank", "observer") and rank.isdecimal() and len(rank) < 10


def _are_possible(*ranks: int) -> bool:
    """Whether a job may have these ranks: what is shown grows with the largest one."""
    return all(0 <= rank < _MOST_RANKS for rank in ranks)


def _is_possible(item: Any) -> bool:
    several: Iterable[Any] = [item, *getattr(item, "records", ())]
    return all(_are_possible(*getattr(each, name, ())) for each in several for name in ("ranks", "peers"))


def _parsed(path: Path, number: int, line: bytes) -> Stamped | Problem:
    try:
        return _stamped(json.loads(line))
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors too
        return Problem(path, number, str(error))


def _stamped(line: Any) -> Stamped:
    """One line, as JSON has it; a ``ValueError`` says what is foreign about it."""
    if not isinstance(line, dict):
        raise ValueError(f"not a record: {line!r:.80}")
    if line.get("schema") != SCHEMA:
        raise ValueError(f"schema {line.get('schema')!r}, this version reads {SCHEMA}")
    try:
        return Stamped(from_json(line), float(line["time"]), float(line["monotonic"]))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"not a whole {line.get('kind')!r:.40} line: {error!r:.200}") from error
