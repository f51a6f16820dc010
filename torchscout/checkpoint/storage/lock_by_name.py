"""Locks a folder where the file system has no locks, by creating a file exclusively (paper, section 9).

The file stays when its owner is killed. A process on the same machine sees that the owner is gone and takes
over; on another machine the folder is refused until somebody removes the file. The lock ends with the first
process of a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from torchscout.checkpoint.storage.owner import Owner, refusal
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import open_file

__all__ = ["owner_of", "take"]

_NAME = "lock.owner"
_TAKING_OVER = "lock.taking-over"
_TIMEOUT_SECONDS = 2.0
_PAUSE_SECONDS = 0.01


def take(folder: Path, owner: Owner) -> Callable[[], None]:
    """Lock this folder and return a function that releases it; raises ``CheckpointError`` if it is in use."""
    path, deadline = folder / _NAME, time.monotonic() + _TIMEOUT_SECONDS
    while not _created(path, owner):
        holder = _read(path)
        if holder is not None and holder.run == owner.run:
            return lambda: None
        if holder is not None and holder.is_gone:
            _remove_stale(folder, holder, owner)
        elif holder is not None or time.monotonic() > deadline:
            raise CheckpointError(refusal(folder, holder, _how_known(path, holder)))
        else:
            time.sleep(_PAUSE_SECONDS)  # not written yet, or just released
    return lambda: _release(path, owner)


def owner_of(folder: Path) -> Owner | None:
    holder = _read(folder / _NAME)
    return None if holder is None or holder.is_gone else holder


def _remove_stale(folder: Path, gone: Owner, owner: Owner) -> None:
    """Remove a dead owner's file. One process at a time, or a late one would remove the next owner's file."""
    if not _created(folder / _TAKING_OVER, owner):
        raise CheckpointError(
            f"{folder} was in use by {gone}, which has ended; another process is taking over. If that was "
            f"killed, remove {folder / _TAKING_OVER}"
        )
    try:
        _release(folder / _NAME, gone)
    finally:
        (folder / _TAKING_OVER).unlink()


def _created(path: Path, owner: Owner) -> bool:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    try:
        os.write(file, owner.to_bytes())
        os.fsync(file)
    finally:
        os.close(file)
    return True


def _read(path: Path) -> Owner | None:
    try:
        file = open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return Owner.from_bytes(os.pread(file, 1 << 16, 0))
    finally:
        os.close(file)


def _release(path: Path, owner: Owner) -> None:
    if _read(path) == owner:
        path.unlink()


def _how_known(path: Path, holder: Owner | None) -> str:
    if holder is not None and holder.is_here:
        return " (this file system has no locks; that process is alive)"
    return f" (this file system has no locks; if that process is no longer alive, remove {path})"
