"""Writes records to the run directory as JSON lines, and reads them back.

All peers reach the same conclusions, so one of them writes an incident (``Incident.reporter``). Callers
handle errors, which must not reach training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from torchscout.decision.records.line_files import MOST_BYTES, LineFile, line_of, opened_files
from torchscout.decision.types import (
    SCHEMA,
    Agreements,
    Decision,
    EvidenceRecord,
    Incident,
    LeftOut,
    Recordable,
    Resolved,
    Started,
    Trust,
    from_json,
)
from torchscout.log import log

__all__ = [
    "HISTORY_FILE",
    "INCIDENTS_FILE",
    "RECORDS_FOLDER",
    "REPLAY_FILE",
    "Follower",
    "IncidentLog",
    "JsonlRecorder",
    "Problem",
    "Recorder",
    "Stamped",
    "log_incident",
    "read",
    "record_one",
]

INCIDENTS_FILE = "incidents.jsonl"
RECORDS_FOLDER = "records"
HISTORY_FILE = "history.jsonl"
"""In the run directory, by rank 0: starts of the job, and which checkpoints could be trusted when."""
REPLAY_FILE = "replay.json"
"""In the run directory, by rank 0: whether checks are on or off. Written once they have failed."""


class Recorder(Protocol):
    def record(self, item: Recordable) -> None: ...

    def close(self) -> None: ...


class JsonlRecorder:
    """The run directory: ``incidents.jsonl`` and ``history.jsonl`` for the job, ``records/rank-N.jsonl`` for
    each rank.

    A line that cannot be written, for example on a full disk, raises ``OSError`` and is written with the next
    one. A folder that was removed is created again. Each takes two files of ``most_bytes`` at most. Of older
    incidents, the first of each kind are kept and the others are counted; see ``line_files``.
    """

    def __init__(self, run_dir: Path | str, rank: int, *, most_bytes: int = MOST_BYTES) -> None:
        incidents = LineFile(Path(run_dir) / INCIDENTS_FILE, most_bytes, keeps_first=True)
        records = LineFile(Path(run_dir) / RECORDS_FOLDER / f"rank-{rank}.jsonl", most_bytes)
        history = LineFile(Path(run_dir) / HISTORY_FILE, most_bytes)
        self._lines: dict[type, LineFile] = dict.fromkeys((Incident, Resolved, Decision), incidents)
        self._lines |= dict.fromkeys((EvidenceRecord, Agreements), records)
        self._lines |= dict.fromkeys((Started, Trust), history)

    def record(self, item: Recordable) -> None:
        self._lines[type(item)].add(line_of(item))

    def close(self) -> None:
        for lines in set(self._lines.values()):
            lines.close()


def record_one(run_dir: Path | str, rank: int, item: Recordable) -> None:
    """Write one item; raises ``OSError`` if that fails."""
    recorder = JsonlRecorder(run_dir, rank)
    recorder.record(item)
    recorder.close()


def log_incident(item: Incident | Resolved) -> None:
    """Log an incident as an error, or its end as information."""
    if isinstance(item, Incident):
        log.error("incident (%s) at step %d: %s", item.manifestation.value, item.step, item.sentence)
    elif item.recovered is not None:
        log.info("recovered by going back to step %d: %s", item.recovered, item.sentence)
    else:
        log.info("resolved after %.1f s: %s", item.stalled_seconds, item.sentence)


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
    """Yield every line of a JSONL file in order, beginning with the older files; see ``line_files``.

    A truncated or foreign line is a ``Problem``. Raises ``FileNotFoundError`` if there is no file.
    """
    with ExitStack() as opened:
        for each, file in opened_files(Path(path), opened):
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parsed(each, number, line)


class Follower:
    """Reads a growing JSONL file, each line once, beginning with the older files.

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
        """Yield what the older files have, and begin with the newest one."""
        with ExitStack() as opened:
            *older, (_, newest) = opened_files(self._path, opened)
            self._begin(os.fdopen(os.dup(newest.fileno()), "rb"))
            for path, file in older:
                for number, line in enumerate(file, start=1):
                    yield from self._items(path, number, line)

    def _rest(self) -> Iterator[Stamped]:
        assert self._file is not None
        self._file.seek(self._read)
        for line in self._file:
            if not line.endswith(b"\n"):
                return
            self._read, self._number = self._read + len(line), self._number + 1
            yield from self._items(self._path, self._number, line)

    def _items(self, path: Path, number: int, line: bytes) -> Iterator[Stamped]:
        parsed = _parsed(path, number, line) if line.strip() else None
        if isinstance(parsed, Stamped):
            yield parsed
        elif parsed is not None and self._strict:
            raise ValueError(str(parsed))


class IncidentLog:
    """Follows ``incidents.jsonl`` of a run directory; without that file there are no incidents."""

    def __init__(self, run_dir: Path | str, *, strict: bool = False) -> None:
        """``strict`` as in ``Follower``."""
        self.entries: list[tuple[Incident, Resolved | None]] = []
        """What has been read so far: each incident and how it ended, None while it is open."""
        self.decisions: list[Decision] = []
        """What was decided about them."""
        self.left_out = 0
        """Older lines that are not kept."""
        self._file = Follower(Path(run_dir) / INCIDENTS_FILE, strict=strict)

    @classmethod
    def read(cls, run_dir: Path | str) -> IncidentLog:
        """Return the log as it is now; raises ``OSError`` if it cannot be read."""
        log = cls(run_dir)
        log.new()
        log._file.close()
        return log

    @property
    def incidents(self) -> list[Incident]:
        return [incident for incident, _ in self.entries]

    @property
    def open_incidents(self) -> list[Incident]:
        return [incident for incident, end in self.entries if end is None]

    def new(self) -> list[Stamped]:
        """Read on, and return the incidents that were added since the last call."""
        added = []
        for line in self._file.fresh():
            self.add(line.item)
            if isinstance(line.item, Incident):
                added.append(line)
        return added

    def add(self, item: Recordable) -> None:
        """Add one line of the file."""
        if isinstance(item, Incident):
            self.entries.append((item, None))
        elif isinstance(item, Decision):
            self.decisions.append(item)
        elif isinstance(item, LeftOut):
            self.left_out += item.count
        elif isinstance(item, Resolved):
            # The same may happen again later, and is then open.
            self.entries = [
                (incident, item if end is None and incident.sentence == item.sentence else end)
                for incident, end in self.entries
            ]


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
