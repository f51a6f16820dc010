"""Reads a run directory, also that of a live run: what is damaged or foreign is noted, and the rest is used.

The files of several writers are merged. Machines that do not share a disk write the same incidents; copied
into one folder, each is there once.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

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
    RANKS_FOLDER,
    RECORDS_FOLDER,
    REPLAY_FILE,
    RUNS_FILE,
    End,
    Heartbeat,
    RankEntry,
    are_possible,
    read_all,
    read_heartbeat,
    read_unwatched,
)
from torchscout.utils.private_files import open_to_read

__all__ = [
    "Follower",
    "IncidentLog",
    "Problem",
    "Reported",
    "Run",
    "Stamped",
    "incident_lines",
    "is_run",
    "line_files",
    "read",
    "read_run",
    "runs_of",
]

Kind = TypeVar("Kind", bound=Recordable)
_MOST_PROBLEMS = 200
"""Problems that are kept in words; further ones are counted."""
_WRITERS = re.compile(r"(?P<file>(rank|observer)-(?P<rank>\d{1,9})\.jsonl)(\.[12])?", re.ASCII)


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
    """Yield every line of a file in order, beginning with its older parts; none if there is no file.

    A truncated or foreign line is a ``Problem``; see ``run.writer`` for the parts.
    """
    path = Path(path)
    with ExitStack() as opened:
        files: list[BinaryIO] = []
        # The newest first: if it is renamed in between, it is found under both names and read once.
        for part in (path, path.with_name(f"{path.name}.2"), path.with_name(f"{path.name}.1")):
            with suppress(FileNotFoundError):
                file: BinaryIO = opened.enter_context(part.open("rb"))
                if not any(os.path.sameopenfile(file.fileno(), other.fileno()) for other in files):
                    files.insert(0, file)
        for file in files:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    found = _parsed(line)
                    yield found if isinstance(found, Stamped) else Problem(Path(file.name), number, found)


def incident_lines(run_dir: Path) -> list[Stamped | Problem]:
    """Return every line about incidents, of all writers, in the order of time; raises ``OSError``."""
    lines = [line for _, path in line_files(run_dir / INCIDENTS_FOLDER) for line in read(path)]
    return sorted(lines, key=lambda line: line.time if isinstance(line, Stamped) else -math.inf)


class Follower:
    """Reads a file from its beginning while it grows, each line once, also when it is full and renamed.

    Lines that cannot be read are skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None  # open, so that no other file can get its number

    def fresh(self) -> Iterator[Stamped]:
        """Yield what was added since the last call; an incomplete last line is left for the next one."""
        try:
            if self._file is None:
                self._file = self._path.open("rb")
            elif not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                yield from _complete(self._file)
                self.close()
                self._file = self._path.open("rb")
        except FileNotFoundError:
            return
        yield from _complete(self._file)

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


class IncidentLog:
    """The incidents of a run directory, of all writers; without their folder there are none."""

    def __init__(self, run_dir: Path | str) -> None:
        self._run_dir = Path(run_dir)
        self.lines: dict[tuple[object, ...], Stamped] = {}
        """Each incident, end of an incident and decision, once. An end may be read before its incident, from
        another file."""

    @classmethod
    def read(cls, run_dir: Path | str) -> IncidentLog:
        """Return the log as it is now; raises ``OSError`` if it cannot be read."""
        log = cls(run_dir)
        log.new()
        return log

    @property
    def reported(self) -> list[Reported]:
        """Return what has been read so far: each incident, and how it ended."""
        ends = {end.incident: end for _, end in _of(self.lines.values(), Resolved)}
        found = _of(self.lines.values(), Incident)
        return [Reported(incident, time, ends.get(incident.id)) for time, incident in found]

    @property
    def incidents(self) -> list[Incident]:
        return [each.incident for each in self.reported]

    @property
    def decisions(self) -> list[Decision]:
        return [decision for _, decision in _of(self.lines.values(), Decision)]

    def new(self) -> list[Stamped]:
        """Read the files, and return the incidents that were added since the last call."""
        lines = [line for line in incident_lines(self._run_dir) if isinstance(line, Stamped)]
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
    """None while it is open."""


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
    """Problems beyond ``_MOST_PROBLEMS``."""
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
            return (self.run_dir / RANKS_FOLDER).stat().st_mtime
        except OSError:
            return 0.0

    def note(self, problem: object) -> None:
        self.unread = self.unread or (str(problem) if isinstance(problem, OSError) else "")
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(str(problem))
        else:
            self.unlisted += 1

    def lines(
        self, path: Path, read: Callable[[Path], Iterable[Stamped | Problem]] = read
    ) -> Iterator[Stamped]:
        """Yield the lines there that a writer may have written, and note all others."""
        try:
            for line in read(path):
                if isinstance(line, Problem):
                    self.note(line)
                elif math.isfinite(line.time) and _is_possible(line.item):
                    yield line
                else:
                    self.note(f"{path}: no writer has such a time or rank; the line is left out")
        except OSError as error:
            self.note(error)

    def read_ranks(self) -> None:
        """Read where each rank runs, and how it ended."""
        try:
            self.entries = read_all(RankEntry, self.run_dir, self.note)
            records = {entry.rank: entry.record for entry in self.entries}
            ends = read_all(End, self.run_dir, self.note)
            self.ends = [end for end in ends if records.get(end.rank) == end.record]
            self.unwatched = [rank for rank in read_unwatched(self.run_dir) if rank in records]
        except OSError as error:
            self.note(error)

    def read_events(self) -> None:
        """Read incidents, decisions, starts, and which checkpoints could be trusted."""
        log = IncidentLog(self.run_dir)
        for line in self.lines(self.run_dir, incident_lines):
            log.add(line)
        self.incidents = log.reported
        events = log.lines.values()
        self.resolved, self.decisions = _of(events, Resolved), _of(events, Decision)
        history = [*self.lines(self.run_dir / HISTORY_FILE)]
        self.starts, self.trust = _of(history, Started), _of(history, Trust)

    def last_heartbeat(self) -> Heartbeat | None:
        """Return the last heartbeat of the present session; None if there is none."""
        beat = read_heartbeat(self.run_dir)
        sessions = {(entry.rank, entry.record) for entry in self.entries}
        return beat if beat is not None and (beat.rank, beat.record) in sessions else None

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
        with open_to_read(checkpoints / RUNS_FILE) as file:
            lines = file.read().splitlines()
        for line in lines:
            with suppress(ValueError):  # a line that a full disk has cut short
                if isinstance(run_dir := json.loads(line), str):
                    found[Path(run_dir)] = None
    return [*found]


def is_run(run_dir: Path) -> bool:
    """Whether this folder has any file that a run writes."""
    names = (INCIDENTS_FOLDER, HISTORY_FILE, RECORDS_FOLDER, RANKS_FOLDER)
    return any((run_dir / name).exists() for name in names)


def line_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the files of all writers in ``incidents/`` or ``records/``, with their ranks; of some there may
    be an older part only. Raises ``OSError``."""
    try:
        named = [_WRITERS.fullmatch(path.name) for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted({(int(each["rank"]), folder / each["file"]) for each in named if each is not None})


def _is_possible(item: Any) -> bool:
    several: Iterable[Any] = [item, *getattr(item, "records", ())]
    return all(are_possible(*getattr(each, name, ())) for each in several for name in ("ranks", "peers"))


def _of(lines: Iterable[Stamped], kind: type[Kind]) -> list[tuple[float, Kind]]:
    """Return the items of one kind, each with the time at which it was written."""
    return [(line.time, line.item) for line in lines if isinstance(line.item, kind)]


def _complete(file: BinaryIO) -> Iterator[Stamped]:
    """Yield the lines that can be read; the file stays before an incomplete one."""
    for line in file:
        if not line.endswith(b"\n"):
            file.seek(-len(line), os.SEEK_CUR)
            return
        if isinstance(found := _parsed(line), Stamped):
            yield found


def _parsed(line: bytes) -> Stamped | str:
    """Return a line or, in words, what is foreign about it."""
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            return f"not a record: {found!r:.80}"
        if found.get("schema") != SCHEMA:
            return f"schema {found.get('schema')!r}, this version reads {SCHEMA}"
        return Stamped(from_json(found), float(found["time"]), float(found["monotonic"]))
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors too
        return str(error)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        return f"not a whole line: {error!r:.200}"
