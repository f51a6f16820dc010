"""Writes records to the run directory as JSON lines, and reads them back.

All peers reach the same conclusions, so one of them writes an incident (``Incident.reporter``). Callers
handle errors, which must not reach training.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from torchscout.decision.records.record import SCHEMA, Decision, Incident, Recordable, Resolved, from_json
from torchscout.log import log
from torchscout.utils.private_files import make_folders, open_file

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
    "line_of",
    "log_incident",
    "read",
    "record_one",
]

_MOST_WAITING = 256
"""Lines that wait while the disk is full; older ones are dropped."""
INCIDENTS_FILE = "incidents.jsonl"
RECORDS_FOLDER = "records"
HISTORY_FILE = "history.jsonl"
"""In the run directory, by rank 0: starts of the job, and which checkpoints could be trusted when."""
REPLAY_FILE = "replay.json"
"""In the run directory, by rank 0: whether checks are on or off. Written once they have failed."""
MOST_BYTES = 16 << 20
"""The size of a file of records. A full file is renamed, and replaces the one that was full before."""


class Recorder(Protocol):
    def record(self, item: Recordable) -> None: ...

    def close(self) -> None: ...


def line_of(item: Recordable) -> bytes:
    """Return the item as one JSON line with the time; raises ``ValueError`` for NaN and infinity."""
    return _line(item.to_json())


def _line(document: dict[str, Any]) -> bytes:
    line = {"schema": SCHEMA, "time": time.time(), "monotonic": time.monotonic(), **document}
    return (json.dumps(line, allow_nan=False) + "\n").encode()


class JsonlRecorder:
    """The run directory: ``incidents.jsonl`` and ``history.jsonl`` for the job, ``records/rank-N.jsonl`` for
    each rank.

    A line that cannot be written, for example on a full disk, raises ``OSError`` and is written with the next
    one. A folder that was removed is created again. Records take two files of ``most_bytes`` at most; all
    incidents are kept.
    """

    def __init__(self, run_dir: Path | str, rank: int, *, most_bytes: int = MOST_BYTES) -> None:
        incidents = _Lines(Path(run_dir) / INCIDENTS_FILE)
        records = _Lines(Path(run_dir) / RECORDS_FOLDER / f"rank-{rank}.jsonl", most_bytes)
        history = _Lines(Path(run_dir) / HISTORY_FILE, most_bytes)
        self._lines = dict.fromkeys(("incident", "resolved", "decision"), incidents)
        self._lines |= dict.fromkeys(("evidence", "agreements"), records)
        self._lines |= dict.fromkeys(("started", "trust"), history)

    def record(self, item: Recordable) -> None:
        document = item.to_json()
        self._lines[document["kind"]].add(_line(document))

    def close(self) -> None:
        for lines in set(self._lines.values()):
            lines.close()


def record_one(run_dir: Path | str, rank: int, item: Recordable) -> None:
    """Write one item; raises ``OSError`` if that fails."""
    recorder = JsonlRecorder(run_dir, rank)
    recorder.record(item)
    recorder.close()


class _Lines:
    """A file of lines that several processes append to, or one process if its size is limited."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._file: int | None = None
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)

    def add(self, line: bytes) -> None:
        self._waiting.append(line)
        self._write()

    def close(self) -> None:
        try:
            if self._waiting:
                self._write()
        finally:
            self._close()

    def _write(self) -> None:
        while self._waiting:
            file = self._opened()
            # One write to an append-only file: several ranks add incidents, and readers see whole lines.
            # A line that a full disk or a crash has truncated must not merge with this one.
            line = b"\n" * _is_cut(file) + self._waiting[0]
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._waiting.popleft()

    def _opened(self) -> int:
        """Return a file with this name that is not full; the open one may have been removed."""
        if self._file is not None and not self._is_there(self._file):
            self._close()
        file = self._open() if self._file is None else self._file
        if self._most_bytes is not None and os.fstat(file).st_size >= self._most_bytes:
            self._path.replace(_older(self._path))
            self._close()
            file = self._open()
        return file

    def _open(self) -> int:
        make_folders(self._path.parent)
        # Owner-only: the stacks in incidents contain private paths and names.
        self._file = open_file(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        return self._file

    def _is_there(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self._path.lstat())
        except OSError:
            return False

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _older(path: Path) -> Path:
    """The name of a full file; its suffix keeps it out of searches for ``*.jsonl``."""
    return path.with_name(f"{path.name}.1")


def _is_cut(file: int) -> bool:
    size = os.fstat(file).st_size
    return bool(size) and os.pread(file, 1, size - 1) != b"\n"


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
    """Yield every line of a JSONL file in order, beginning with the previous full file.

    A truncated or foreign line is a ``Problem``. Raises ``FileNotFoundError`` if there is no file.
    """
    with ExitStack() as opened:
        for each, file in _files(Path(path), opened):
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parsed(each, number, line)


def _files(path: Path, opened: ExitStack) -> list[tuple[Path, BinaryIO]]:
    """Open the full file, if there is one, and the current one."""
    found: list[tuple[Path, BinaryIO]] = []
    # The current one first: if it is renamed in between, it is found under both names and read once.
    for each in (path, _older(path)):
        with suppress(FileNotFoundError):
            found.append((each, opened.enter_context(each.open("rb"))))
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if len(found) == 2 and os.path.sameopenfile(*(file.fileno() for _, file in found)):
        found.pop()
    return found[::-1]


class Follower:
    """Reads a growing JSONL file, each line once.

    A line that cannot be read is skipped or, if ``strict``, raises ``ValueError``.
    """

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        self._path, self._strict = path, strict
        self._file: BinaryIO | None = None  # open, so that no other file can get its number
        self._read, self._number = 0, 0
        """Bytes and lines so far."""

    def fresh(self) -> Iterator[Stamped]:
        """Yield what was added since the last call; an incomplete last line is left for the next one."""
        file = self._opened()
        if file is None:
            return
        file.seek(self._read)
        for line in file:
            if not line.endswith(b"\n"):
                return
            self._read, self._number = self._read + len(line), self._number + 1
            parsed = _parsed(self._path, self._number, line) if line.strip() else None
            if isinstance(parsed, Stamped):
                yield parsed
            elif parsed is not None and self._strict:
                raise ValueError(str(parsed))

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _opened(self) -> BinaryIO | None:
        """The file, from its beginning if it was removed and made again; None if nothing is new."""
        try:
            status = self._path.stat()
            if self._file is None or not os.path.samestat(status, os.fstat(self._file.fileno())):
                self.close()
                self._file = self._path.open("rb")
                self._read = self._number = 0
        except (FileNotFoundError, NotADirectoryError):
            return None
        return self._file if status.st_size > self._read else None


class IncidentLog:
    """Follows ``incidents.jsonl`` of a run directory; without that file there are no incidents."""

    def __init__(self, run_dir: Path | str, *, strict: bool = False) -> None:
        """``strict`` as in ``Follower``."""
        self.entries: list[tuple[Incident, Resolved | None]] = []
        """What has been read so far: each incident and how it ended, None while it is open."""
        self.decisions: list[Decision] = []
        """What was decided about them."""
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
