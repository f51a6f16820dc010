"""One job at a time in a folder whose file system has no locks (paper, section 9, recovery integration).

A file that says who holds the folder, which only one can create. It stays when its owner is killed; the next
one on the same machine sees that the process is gone, and takes over. From another machine that cannot be
seen: the folder is refused until a person removes the file. It ends with the first process of a run.
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
_PATIENCE_SECONDS = 2.0
_PAUSE_SECONDS = 0.01


def take(folder: Path, owner: Owner) -> Callable[[], None]:
    """Take this folder, for a call that gives it back, or raise ``CheckpointError``."""
    path, deadline = folder / _NAME, time.monotonic() + _PATIENCE_SECONDS
    while not _created(path, owner):
        holder = _read(path)
        if holder is not None and holder.run == owner.run:
            return lambda: None
        if holder is not None and holder.is_gone:
            _take_away(folder, holder, owner)
        elif holder is not None or time.monotonic() > deadline:
            raise CheckpointError(refusal(folder, holder, _how_known(path, holder)))
        else:
            time.sleep(_PAUSE_SECONDS)  # not written yet, or given back at this moment
    return lambda: _give_back(path, owner)


def owner_of(folder: Path) -> Owner | None:
    holder = _read(folder / _NAME)
    return None if holder is None or holder.is_gone else holder


def _take_away(folder: Path, gone: Owner, owner: Owner) -> None:
    """Only one at a time may: a second one, late, would take away the next owner's file."""
    if not _created(folder / _TAKING_OVER, owner):
        raise CheckpointError(
            f"{folder} was in use by {gone}, which is gone; another process is taking over, or was killed "
            f"while it did: if so, remove {folder / _TAKING_OVER}"
        )
    try:
        _give_back(folder / _NAME, gone)
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


def _give_back(path: Path, owner: Owner) -> None:
    if _read(path) == owner:
        path.unlink()


def _how_known(path: Path, holder: Owner | None) -> str:
    without = " (this file system has no locks"
    if holder is not None and holder.is_here:
        return f"{without}; that process is alive)"
    return f"{without}, and from here it cannot be seen whether it lives; if not, remove {path})"
