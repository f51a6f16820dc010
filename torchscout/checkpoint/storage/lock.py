"""Locks a checkpoint folder, so that one job at a time uses it (paper, section 9).

The kernel keeps the lock while any process of the job lives, also a stopped one, and releases it with the
last: nothing has to be cleaned up after a crash. ``lock_by_name`` is the fallback for file systems without
locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from torchscout.checkpoint.storage import lock_by_name
from torchscout.checkpoint.storage.owner import Owner, refusal
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import open_file

__all__ = ["Lock", "claim", "owner_of"]

# [Note: one run, many processes]
#
# Every process of a run holds the lock, shared. The first takes it exclusively, writes the owner into the
# file, and then downgrades to shared. A process that gets it shared reads the owner and stays if that is its
# own run. While a process holds it exclusively, the owner is unknown for a moment. Downgrading is not atomic:
# a process that loses the lock there starts again. The file is never deleted: a lock on a deleted file
# excludes nobody.
_NAME = "lock"
_TIMEOUT_SECONDS = 2.0
_PAUSE_SECONDS = 0.01
_TAKEN = {errno.EWOULDBLOCK, errno.EACCES}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_UNKNOWN = Owner("unknown", "an unknown host", 0, None, "an unknown time", "")


class Lock:
    """A claim on a folder until ``release``, the end of the ``with`` block, or the end of the process."""

    def __init__(self, folder: Path, owner: Owner, file: int | None, give_back: Callable[[], None]) -> None:
        self.folder, self.owner = folder, owner
        self._file, self._give_back = file, give_back
        _held.add(self)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Idempotent."""
        if self in _held:
            _held.remove(self)
            self._give_back()

    def forget(self) -> None:
        """Close the lock's file in a forked child, which must not hold the folder."""
        if self._file is not None:
            os.close(self._file)


_held: set[Lock] = set()
"""Keeps claims alive that nobody refers to."""


def claim(folder: Path | str, job: str, run: str | None = None) -> Lock:
    """Lock this folder, creating it if missing; raises ``CheckpointError``, with the owner, if it is in use.

    All processes of a run pass the same ``run``, a string unique to it, and hold the folder together; without
    one this process holds it alone. It may be secret: only a digest is stored.
    """
    folder, owner = Path(folder), Owner.own(job, run or secrets.token_hex(16))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open_file(folder / _NAME, os.O_RDWR | os.O_CREAT)
        try:
            holder = _acquire(file, owner)
        except OSError as error:
            os.close(file)
            if error.errno not in _NO_LOCKS:
                raise
            return Lock(folder, owner, None, lock_by_name.take(folder, owner))
    except OSError as error:
        raise CheckpointError(f"cannot lock {folder}: {error.strerror}") from error
    if holder is None or holder.run != owner.run:
        os.close(file)
        raise CheckpointError(refusal(folder, holder))
    return Lock(folder, owner, file, lambda: _release(file))


def owner_of(folder: Path | str) -> Owner | None:
    """The process that holds this folder now; None if nobody does. Writes nothing."""
    folder = Path(folder)
    try:
        file = _opened(folder / _NAME)
        try:
            return None if _locked(file, fcntl.LOCK_EX) else _read_owner(file) or _UNKNOWN
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return lock_by_name.owner_of(folder)
        finally:
            os.close(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read the lock of {folder}: {error.strerror}") from error


def _acquire(file: int, owner: Owner) -> Owner | None:
    """Acquire the lock, shared, and return its owner; None if it cannot be acquired."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        if _locked(file, fcntl.LOCK_EX):
            os.ftruncate(file, 0)
            os.pwrite(file, owner.to_bytes(), 0)
        if _locked(file, fcntl.LOCK_SH):
            if (holder := _read_owner(file)) is not None:
                return holder
            fcntl.flock(file, fcntl.LOCK_UN)  # the owner has just released it
        time.sleep(_PAUSE_SECONDS)
    return None


def _release(file: int) -> None:
    """Release the lock; the last process of a run clears the owner."""
    try:
        if _locked(file, fcntl.LOCK_EX):
            os.ftruncate(file, 0)
    finally:
        os.close(file)


def _opened(path: Path) -> int:
    try:
        return open_file(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        return open_file(path, os.O_RDONLY)  # enough for locks on a local disk


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    return True


def _read_owner(file: int) -> Owner | None:
    return Owner.from_bytes(os.pread(file, 1 << 16, 0))


def _forget_all() -> None:
    for lock in _held:
        lock.forget()
    _held.clear()


# A forked child, such as a data loader's worker, may outlive the trainer for a while.
os.register_at_fork(after_in_child=_forget_all)
