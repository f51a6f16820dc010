"""Files and folders under names that others can predict: owner-only, checked, and never through a link.

Whoever may write to ``/dev/shm`` or ``/tmp`` can put a link or a folder under such a name beforehand.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

__all__ = ["is_private", "make_folders", "make_private_folder", "open_file", "open_private", "replace_text"]

_UNFOLLOWED = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe of that name must not hold anybody up


def is_private(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Whether this is of that kind, belongs to this user, and nobody else may use it."""
    return is_kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def make_private_folder(path: Path, *, parents: bool = False) -> None:
    """Have this folder, for this user alone; ``PermissionError`` if something else has its name."""
    path.mkdir(mode=0o700, parents=parents, exist_ok=True)
    if not is_private(os.lstat(path), stat.S_ISDIR):
        raise PermissionError(
            errno.EPERM, "it must be a folder that belongs to this user alone (mode 0700)", str(path)
        )


def make_folders(path: Path) -> None:
    """Have this folder; what is missing of it and its parents is made for this user alone."""
    for folder in (*reversed(path.parents), path):
        folder.mkdir(mode=0o700, exist_ok=True)


def open_file(path: Path, flags: int, mode: int = 0o600) -> int:
    """A descriptor of a regular file; an ``OSError`` for a link, a pipe or anything else."""
    file = os.open(path, flags | _UNFOLLOWED, mode)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def open_private(path: Path, flags: int) -> int:
    """The same for a file that must be this user's alone."""
    file = open_file(path, flags)
    if not is_private(os.fstat(file), stat.S_ISREG):
        os.close(file)
        raise PermissionError(
            errno.EPERM, "it must be a file that belongs to this user alone (mode 0600)", str(path)
        )
    return file


def replace_text(path: Path, text: str) -> None:
    """Put a new owner-only file under this name, whatever was there."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    file = open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(file, "w") as stream:
            stream.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
