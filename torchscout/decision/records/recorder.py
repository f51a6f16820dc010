"""Writes records to the run directory as JSON lines, and reads them back.

Besides what ``decision.types`` has, there is the history of the job (``Started``, ``Trust``), and comparisons
without a finding, of which a healthy job makes many, are counted (``Agreements``). All peers reach the same
conclusions, so one of them writes an incident (``Incident.reporter``). Callers handle errors, which must not
reach training.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

from torchscout.config import StragglerConfig
from torchscout.decision.records.line_files import MOST_BYTES, LeftOut, LineFile, line_of, opened_files
from torchscout.decision.types import (
    SCHEMA,
    Decision,
    EvidenceRecord,
    Incident,
    Manifestation,
    Recordable,
    Resolved,
    Surface,
    from_json,
    headline,
)
from torchscout.log import log

__all__ = [
    "HISTORY_FILE",
    "INCIDENTS_FILE",
    "RECORDS_FOLDER",
    "REPLAY_FILE",
    "Agreement",
    "Agreements",
    "Follower",
    "IncidentLog",
    "JsonlRecorder",
    "Problem",
    "Recorder",
    "Stamped",
    "Started",
    "SummaryRecorder",
    "Trust",
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

_CHECKS = 100
"""Counts are written after this many checks; at first sooner, so that a short job writes some."""
_SECONDS = 600.0
"""Counts are written after this time."""
_MOST = 1000
"""At most this many counts are kept, besides those of one check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How often one surface was compared without a finding."""

    surface: Surface
    manifestation: Manifestation
    layer: str | None
    mode: str | None
    count: int
    first: int
    """The step of the first comparison."""
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreements(Recordable):
    """The comparisons of some peers without a finding since the last such line, instead of their records."""

    kind: ClassVar[str] = "agreements"
    peers: tuple[int, ...]
    surfaces: tuple[Agreement, ...]

    def to_json(self) -> dict[str, Any]:
        step = max((each.last for each in self.surfaces), default=0)
        return {**Recordable.to_json(self), "step": step}


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Recordable):
    """A session was attached, or has loaded a checkpoint."""

    kind: ClassVar[str] = "started"
    step: int
    """The step that training continues from."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust(Recordable):
    """The steps of the generations that the checkpoint gate has after a check; None where there is none."""

    kind: ClassVar[str] = "trust"
    step: int
    """The step of the check."""
    latest: int | None
    candidate: int | None
    verified: int | None
    poisoned: int | None
    """The step whose check found corruption, until the job has recovered."""


_KINDS = (EvidenceRecord, Incident, Resolved, Decision, Agreements, Started, Trust, LeftOut)


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


class SummaryRecorder:
    """Writes findings at once, and counts of all other comparisons from time to time.

    A process that is killed loses the counts since then.
    """

    def __init__(
        self, recorder: Recorder, config: StragglerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``config`` decides which differences of times are findings."""
        self._recorder, self._config, self._clock = recorder, config, clock
        self._counts: dict[tuple[Any, ...], tuple[tuple[int, ...], Agreement]] = {}
        """By what was compared among which peers; with the peers."""
        self._step: int | None = None
        self._checks, self._enough = 0, 1
        self._since = clock()

    def record(self, item: Recordable) -> None:
        if not isinstance(item, EvidenceRecord) or _has_finding(item, self._config):
            self._recorder.record(item)
            return
        complete = self._taken() if item.step != self._step and self._is_time() else []
        self._checks += item.step != self._step
        self._step = item.step
        what = {name: getattr(item, name) for name in ("surface", "manifestation", "layer", "mode")}
        key = (item.peers, *what.values())
        _, known = self._counts.get(key, (None, Agreement(**what, count=0, first=item.step, last=item.step)))
        self._counts[key] = item.peers, replace(known, count=known.count + 1, last=item.step)
        self._write(complete)  # last: it may fail

    def close(self) -> None:
        try:
            self._write(self._taken())
        finally:
            self._recorder.close()

    def _is_time(self) -> bool:
        """Called at the beginning of a check, so that lines contain whole checks."""
        is_late = self._clock() - self._since >= _SECONDS
        return self._checks >= self._enough or is_late or len(self._counts) >= _MOST

    def _taken(self) -> list[Agreements]:
        by_peers: dict[tuple[int, ...], list[Agreement]] = {}
        for peers, each in self._counts.values():
            by_peers.setdefault(peers, []).append(each)
        self._counts, self._checks, self._since = {}, 0, self._clock()
        self._enough = min(2 * self._enough, _CHECKS)
        return [Agreements(peers=peers, surfaces=tuple(each)) for peers, each in by_peers.items()]

    def _write(self, lines: list[Agreements]) -> None:
        with ExitStack() as writes:  # writes all lines, even if one fails
            for each in lines:
                writes.callback(self._recorder.record, each)


def _has_finding(record: EvidenceRecord, config: StragglerConfig) -> bool:
    """Whether peers disagreed, or nothing was compared; times must differ materially."""
    if record.verdict is None or record.verdict.agrees:
        return record.verdict is None
    if record.manifestation is not Manifestation.STRAGGLER:
        return True
    from torchscout.decision.timings import PeerTimes  # not above: observers need no NumPy

    times = PeerTimes.of(record, config)
    return times is None or bool(times.slower())


def record_one(run_dir: Path | str, rank: int, item: Recordable) -> None:
    """Write one item; raises ``OSError`` if that fails."""
    recorder = JsonlRecorder(run_dir, rank)
    recorder.record(item)
    recorder.close()


def log_incident(item: Incident | Resolved) -> None:
    """Log an incident as an error, or its end as information."""
    if isinstance(item, Incident):
        log.error("%s", headline(item))
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
        return Stamped(from_json(line, *_KINDS), float(line["time"]), float(line["monotonic"]))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"not a whole {line.get('kind')!r:.40} line: {error!r:.200}") from error
