"""One job at a time in a checkpoint folder (paper, section 9, recovery integration).

The kernel keeps the lock for as long as a process of the job lives, and drops it with the last one:
nothing has to be cleaned up after a crash. A stopped process lives. Where the file system has no such
locks, ``lock_by_name`` is used instead, and every refusal says so.
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
# Every process of a run holds the lock, shared. Whoever comes first takes it alone, writes down whose it is,
# and then shares it; whoever can share it reads whose it is, and stays if that is its own run. While somebody
# has it alone nothing can be told, which is over in a moment. Going from alone to shared is not atomic: who
# loses it there begins again. The file is never deleted: a lock on a file without a name keeps nobody out.
_NAME = "lock"
_PATIENCE_SECONDS = 2.0
_PAUSE_SECONDS = 0.01
_TAKEN = {errno.EWOULDBLOCK, errno.EACCES}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_UNKNOWN = Owner("unknown", "an unknown host", 0, None, "an unknown time", "")


class Lock:
    """A claim, until ``release``, the end of the ``with`` block, or the end of the process."""

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
        """In a child of the process that claimed: the folder is not the child's to hold."""
        if self._file is not None:
            os.close(self._file)


_held: set[Lock] = set()
"""Kept alive: a claim that nobody refers to is a claim all the same."""


def claim(folder: Path | str, job: str, run: str | None = None) -> Lock:
    """Take this folder, which is made if missing, or raise a ``CheckpointError`` that says who has it.

    All processes of a run give the same ``run``, a text that no other run of any job has, and hold the folder
    together; without one this process holds it alone. It may be secret: what is written is a digest.
    """
    folder, owner = Path(folder), Owner.own(job, run or secrets.token_hex(16))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open_file(folder / _NAME, os.O_RDWR | os.O_CREAT)
        try:
            holder = _settled(file, owner)
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
    return Lock(folder, owner, file, lambda: _left(file))


def owner_of(folder: Path | str) -> Owner | None:
    """Who holds this folder at this moment; None if nobody does. Writes nothing."""
    folder = Path(folder)
    try:
        file = _opened(folder / _NAME)
        try:
            return None if _locked(file, fcntl.LOCK_EX) else _told(file) or _UNKNOWN
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return lock_by_name.owner_of(folder)
        finally:
            os.close(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot tell who holds {folder}: {error.strerror}") from error


def _settled(file: int, owner: Owner) -> Owner | None:
    """Whose the lock is, once that can be told; it is held then, shared. None if it cannot."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if _locked(file, fcntl.LOCK_EX):
            os.ftruncate(file, 0)
            os.pwrite(file, owner.to_bytes(), 0)
        if _locked(file, fcntl.LOCK_SH):
            if (holder := _told(file)) is not None:
                return holder
            fcntl.flock(file, fcntl.LOCK_UN)  # released at this moment
        time.sleep(_PAUSE_SECONDS)
    return None


def _left(file: int) -> None:
    """The last one to leave says that nobody is there."""
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
        return open_file(path, os.O_RDONLY)  # good enough on a machine's own disk


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    return True


def _told(file: int) -> Owner | None:
    return Owner.from_bytes(os.pread(file, 1 << 16, 0))


def _forget_all() -> None:
    for lock in _held:
        lock.forget()
    _held.clear()


# A worker that a trainer forks, for its data say, may outlive it for a while.
os.register_at_fork(after_in_child=_forget_all)
