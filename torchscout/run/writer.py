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
from contextlib import closing
from pathlib import Path
from typing import Literal, Protocol

from torchscout.decision.types import (
    SCHEMA,
    Agreements,
    Decision,
    EvidenceRecord,
    Incident,
    Recordable,
    Resolved,
    Started,
    Trust,
)
from torchscout.run.folder import HISTORY_FILE, INCIDENTS_FOLDER, RECORDS_FOLDER
from torchscout.utils.private_files import make_folders, open_file

__all__ = ["MOST_BYTES", "Recorder", "RunWriter", "line_of", "record_one"]

_MOST_WAITING = 256
"""Lines that wait while the disk is full; older ones are dropped."""
MOST_BYTES = 10 << 20
"""The size of a file. The line that fills it may exceed that."""


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
    with closing(RunWriter(run_dir, rank, by=by)) as writer:
        writer.record(item)


class _LineFile:
    """A file of lines that does not grow without limit."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._file: int | None = None
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)

    def close(self) -> None:
        try:
            self.add()
        finally:
            self._close()

    def add(self, *lines: bytes) -> None:
        """Write these lines, and those that wait."""
        self._waiting.extend(lines)
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
