"""Files of JSON lines that do not grow without limit, and the files that belong to one.

NAME        the newest lines
NAME.1      the lines before them: a full file is renamed, and replaces the one that was full before
NAME.first  the first line of each kind from replaced files, and how many lines were dropped
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Hashable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from torchscout.decision.types import SCHEMA, Recordable
from torchscout.utils.private_files import make_folders, open_file

__all__ = ["MOST_BYTES", "LeftOut", "LineFile", "line_of", "opened_files"]

_MOST_WAITING = 256
"""Lines that wait while the disk is full; older ones are dropped."""
MOST_BYTES = 16 << 20
"""The size of a file. The line that fills it may exceed that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut(Recordable):
    """Older lines that were not kept."""

    kind: ClassVar[str] = "left_out"
    count: int


def line_of(item: Recordable) -> bytes:
    """Return the item as one JSON line with the time; raises ``ValueError`` for NaN and infinity."""
    stamps = {"schema": SCHEMA, "time": time.time(), "monotonic": time.monotonic()}
    return (json.dumps({**stamps, **item.to_json()}, allow_nan=False) + "\n").encode()


class LineFile:
    """A file of lines that several processes may append to.

    A line that cannot be written, for example on a full disk, raises ``OSError`` and is written with the next
    one. A folder that was removed is created again.
    """

    def __init__(self, path: Path, most_bytes: int, *, keeps_first: bool = False) -> None:
        """``keeps_first``: whether the first line of each kind is kept for good."""
        self._path, self._most_bytes, self._keeps_first = path, most_bytes, keeps_first
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
        """Return a file with this name that is not full; the open one may have been removed or renamed."""
        if self._file is not None and not self._is_there(self._file):
            self._close()
        file = self._open() if self._file is None else self._file
        if os.fstat(file).st_size >= self._most_bytes and self._is_mine(file):
            if self._is_there(file):  # otherwise another process has just renamed it
                if self._keeps_first:
                    _keep_first(self._path)
                self._path.replace(_previous(self._path))
            self._close()  # with its lock
            file = self._open()
        return file

    def _is_mine(self, file: int) -> bool:
        """Lock a full file; if another process has, it renames the file, and this line still fits in."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True

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


def opened_files(path: Path, opened: ExitStack) -> list[tuple[Path, BinaryIO]]:
    """Open all files that belong to one, the oldest first. Raises ``FileNotFoundError`` if there is none."""
    found: list[tuple[Path, BinaryIO]] = []
    # The newest first: if it is renamed in between, it is found under both names and read once.
    for each in (path, _previous(path), _first(path)):
        with suppress(FileNotFoundError):
            file = opened.enter_context(each.open("rb"))
            if not any(os.path.sameopenfile(file.fileno(), other.fileno()) for _, other in found):
                found.append((each, file))
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return found[::-1]


def _previous(path: Path) -> Path:
    """Its suffix keeps it out of searches for ``*.jsonl``, as that of ``_first`` does."""
    return path.with_name(f"{path.name}.1")


def _first(path: Path) -> Path:
    return path.with_name(f"{path.name}.first")


def _is_cut(file: int) -> bool:
    size = os.fstat(file).st_size
    return bool(size) and os.pread(file, 1, size - 1) != b"\n"


def _keep_first(path: Path) -> None:
    """Keep what is first of its kind in the file that is about to be replaced, and count the rest."""
    known: set[Hashable] = set()
    with suppress(FileNotFoundError):
        for line in _first(path).read_bytes().splitlines():
            known.update(_kinds_of(line, known))
    try:
        lines = [line for line in _previous(path).read_bytes().splitlines(keepends=True) if line.strip()]
    except FileNotFoundError:
        return
    kept = []
    for line in lines:
        if new := _kinds_of(line, known) - known:
            known |= new
            kept.append(line.rstrip(b"\n") + b"\n")
    added = b"".join([*kept, line_of(LeftOut(count=len(lines) - len(kept)))])
    file = open_file(_first(path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, b"\n" * _is_cut(file) + added)
    finally:
        os.close(file)


def _kinds_of(line: bytes, known: set[Hashable]) -> set[Hashable]:
    """Return what a line may be the first of. An incident that is kept is kept with its end, and a decision
    for each set of machines: those that must not be used again."""
    try:
        document: dict[str, Any] = json.loads(line)
        match document["kind"]:
            case "incident":
                kind = "incident", document["manifestation"], document["scope"]
                is_new = kind not in known
                return {kind, ("open", document["sentence"])} if is_new else {kind}
            case "resolved" if ("open", document["sentence"]) in known:
                return {("resolved", document["sentence"])}
            case "decision":
                return {("decision", document["action"], *document["hosts"])}
            case _:
                return set()
    except (ValueError, RecursionError, LookupError, TypeError):  # damaged, or foreign
        return set()
