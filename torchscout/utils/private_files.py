"""Creates and opens owner-only files and folders under predictable names, never through a link.

Other users who may write to ``/dev/shm`` or ``/tmp`` can create a link or a folder with such a name before.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "NoLocksError",
    "first_text",
    "is_private",
    "make_folders",
    "make_private_folder",
    "open_file",
    "open_private",
    "open_to_read",
    "replace_text",
    "try_lock",
]

_UNFOLLOWED = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class NoLocksError(OSError):
    """The file system has no locks."""


def is_private(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Whether a file is of this kind, belongs to this user, and no other user may use it."""
    return is_kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def make_private_folder(path: Path, *, parents: bool = False) -> None:
    """Create an owner-only folder if it does not exist; raises ``PermissionError`` if it is not one."""
    path.mkdir(mode=0o700, parents=parents, exist_ok=True)
    if not is_private(os.lstat(path), stat.S_ISDIR):
        raise PermissionError(
            errno.EPERM, "must be a folder that belongs to this user alone (0700)", str(path)
        )


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents as owner-only; existing ones are kept."""
    for folder in (*reversed(path.parents), path):
        folder.mkdir(mode=0o700, exist_ok=True)


def open_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a regular file and return its descriptor; raises ``OSError`` for a link, a pipe or a folder."""
    file = os.open(path, flags | _UNFOLLOWED, mode)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def open_to_read(path: Path) -> BinaryIO:
    """As ``open_file``, for reading bytes."""
    return os.fdopen(open_file(path, os.O_RDONLY), "rb")


def try_lock(file: int, how: int) -> bool:
    """Lock an open file, ``fcntl.LOCK_EX`` or ``LOCK_SH``, and return whether that is possible now.

    Raises ``NoLocksError`` where the file system has none.
    """
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise NoLocksError(*error.args) from error
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def open_private(path: Path, flags: int) -> int:
    """As ``open_file``, and raise ``PermissionError`` unless the file is owner-only."""
    file = open_file(path, flags)
    if not is_private(os.fstat(file), stat.S_ISREG):
        os.close(file)
        raise PermissionError(errno.EPERM, "must be a file that belongs to this user alone (0600)", str(path))
    return file


def first_text(path: Path, text: str) -> str:
    """Write a new owner-only file, unless there is one already, and return what it contains.

    All that call it at the same time, from any machine that shares the folder, get the same text.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    file = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(file, "w") as stream:
            stream.write(text)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with os.fdopen(open_file(path, os.O_RDONLY)) as stream:
        return stream.read()


def replace_text(path: Path, text: str) -> None:
    """Replace a file by a new owner-only one, atomically."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    file = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(file, "w") as stream:
            stream.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
