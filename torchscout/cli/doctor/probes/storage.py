"""Whether something can be written to a folder, by writing it; and what its file system is like."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path

from torchscout.checkpoint.storage import lock
from torchscout.cli.doctor.facts import Folder
from torchscout.cli.mounts import is_in_memory
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import is_private

__all__ = ["folder_at"]

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_WORD = b"torchscout was here\n"


def folder_at(path: Path) -> Folder:
    """Of a folder that is still to be made, what can be said where it will be. Leaves nothing behind."""
    path = path.absolute()
    existing = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not existing.is_dir():
        return Folder(path, existing == path, f"{existing} is not a folder")
    space = os.statvfs(existing)
    problem, alone, locks = _written(existing)
    if existing == path:
        alone = is_private(os.lstat(path), stat.S_ISDIR)
    return Folder(
        path,
        existing == path,
        problem,
        alone,
        is_in_memory(existing),
        locks,
        _holder(path) if existing == path else None,
        space.f_blocks * space.f_frsize,
        space.f_bavail * space.f_frsize,
    )


def _written(folder: Path) -> tuple[str | None, bool | None, bool | None]:
    """Write, move and read a small file as checkpoints are; what failed, who may look, whether locks work."""
    try:
        with tempfile.TemporaryDirectory(prefix=".torchscout-doctor-", dir=folder) as name:
            made = Path(name)
            with (made / "writing").open("wb") as file:
                file.write(_WORD)
                file.flush()
                os.fsync(file.fileno())
                locks = _locks(file.fileno())
            (made / "writing").replace(made / "written")
            if (made / "written").read_bytes() != _WORD:
                return "what was written is not what is read", is_private(os.lstat(made), stat.S_ISDIR), locks
            return None, is_private(os.lstat(made), stat.S_ISDIR), locks
    except OSError as error:
        return f"{folder}: {error.strerror}", None, None


def _locks(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _holder(folder: Path) -> str | None:
    try:
        owner = lock.owner_of(folder)
    except CheckpointError:
        return None
    return None if owner is None else str(owner)
