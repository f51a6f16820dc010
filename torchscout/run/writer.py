"""Writes to the run directory as JSON lines, in files of this process alone.

NAME    the newest lines
NAME.1  the oldest ones, which are kept for good: a file that is full is renamed
NAME.2  the full file before NAME; it is replaced by the next one

Callers handle errors, which must not reach training.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from torchscout.config import StragglerConfig
from torchscout.decision.types import (
    SCHEMA,
    Agreement,
    Agreements,
    Decision,
    EvidenceRecord,
    Incident,
    Manifestation,
    Recordable,
    Resolved,
    Started,
    Trust,
)
from torchscout.run.folder import HISTORY_FILE, INCIDENTS_FOLDER, RECORDS_FOLDER
from torchscout.utils.private_files import make_folders, open_file

__all__ = ["MOST_BYTES", "Recorder", "RunWriter", "SummaryRecorder", "line_of", "record_one"]

_MOST_WAITING = 256
"""Lines that wait while the disk is full; older ones are dropped."""
MOST_BYTES = 16 << 20
"""The size of a file. The line that fills it may exceed that."""
_CHECKS = 100
"""Counts are written after this many checks; at first sooner, so that a short job writes some."""
_SECONDS = 600.0
"""Counts are written after this time."""
_MOST = 1000
"""At most this many counts are kept, besides those of one check."""


def line_of(item: Recordable) -> bytes:
    """Return the item as one JSON line with the time; raises ``ValueError`` for NaN and infinity."""
    stamps = {"schema": SCHEMA, "time": time.time(), "monotonic": time.monotonic()}
    return (json.dumps({**stamps, **item.to_json()}, allow_nan=False) + "\n").encode()


class Recorder(Protocol):
    def record(self, item: Recordable) -> None: ...

    def close(self) -> None: ...


class RunWriter:
    """What one process writes: ``by`` the trainer of a rank, or by its observer.

    A line that cannot be written, for example on a full disk, raises ``OSError`` and is written with the next
    one. A folder that was removed is created again. Each file takes three times ``most_bytes`` at most.
    """

    def __init__(
        self,
        run_dir: Path | str,
        rank: int,
        *,
        by: Literal["rank", "observer"] = "rank",
        most_bytes: int = MOST_BYTES,
    ) -> None:
        name = f"{by}-{rank}.jsonl"
        incidents = _LineFile(Path(run_dir) / INCIDENTS_FOLDER / name, most_bytes)
        records = _LineFile(Path(run_dir) / RECORDS_FOLDER / name, most_bytes)
        history = _LineFile(Path(run_dir) / HISTORY_FILE, most_bytes)
        self._files: dict[type, _LineFile] = dict.fromkeys((Incident, Resolved, Decision), incidents)
        self._files |= dict.fromkeys((EvidenceRecord, Agreements), records)
        self._files |= dict.fromkeys((Started, Trust), history)

    def record(self, item: Recordable) -> None:
        self._files[type(item)].add(line_of(item))

    def close(self) -> None:
        for each in set(self._files.values()):
            each.close()


def record_one(
    run_dir: Path | str, rank: int, item: Recordable, *, by: Literal["rank", "observer"] = "rank"
) -> None:
    """Write one item; raises ``OSError`` if that fails."""
    writer = RunWriter(run_dir, rank, by=by)
    writer.record(item)
    writer.close()


class _LineFile:
    """A file of lines that does not grow without limit."""

    def __init__(self, path: Path, most_bytes: int) -> None:
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
            # A line that a full disk or a crash has truncated must not merge with this one.
            line = b"\n" * _is_cut(file) + self._waiting[0]
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._waiting.popleft()

    def _opened(self) -> int:
        """Return a file with this name that is not full; the open one may have been removed or renamed."""
        if self._file is not None and not self._is_there(self._file):
            self._close()
        if self._file is None:
            make_folders(self._path.parent)
            # Owner-only: the stacks in incidents contain private paths and names.
            self._file = open_file(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        if os.fstat(self._file).st_size >= self._most_bytes:
            oldest = self._path.with_name(f"{self._path.name}.1")
            self._path.replace(oldest.with_suffix(".2") if oldest.exists() else oldest)
            self._close()
            return self._opened()
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


def _is_cut(file: int) -> bool:
    size = os.fstat(file).st_size
    return bool(size) and os.pread(file, 1, size - 1) != b"\n"


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
