"""What jobs that have ended keep in a machine's memory, and giving it back (paper, section 8).

A killed job finds its state there again, so nothing goes when a job ends. But some jobs never come back.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchscout.checkpoint.storage import lock
from torchscout.checkpoint.storage.shard_files import files_under
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import is_private

__all__ = ["KeptJob", "forget", "forget_old", "kept_jobs"]

_DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class KeptJob:
    """One job's folder in memory."""

    folder: Path
    bytes: int
    """That it takes."""
    used: float
    """When something in it was changed last, by the file system's clock."""
    holder: str | None
    """The process that is using the folder, for a message; None if it is not in use."""

    @property
    def name(self) -> str:
        return self.folder.name


def kept_jobs(root: Path) -> list[KeptJob]:
    """All of them, by name; what is not a folder of this user alone is left out."""
    return sorted(_found(root), key=lambda job: job.name)


def forget(job: KeptJob) -> None:
    """Delete what it keeps in memory; ``CheckpointError`` while a process of it lives."""
    with lock.claim(job.folder, "scout checkpoint forget"):
        shutil.rmtree(job.folder, ignore_errors=True)


def forget_old(root: Path, own: Path, days: float) -> list[str]:
    """Delete the folders of other jobs that were not used for ``days`` days, and return their names."""
    now = max((path.lstat().st_mtime for path in (own / "lock", own) if path.exists()), default=0.0)
    forgotten = []
    for job in kept_jobs(root):
        if job.folder == own or job.holder is not None or now - job.used < days * _DAY_SECONDS:
            continue
        if _is_forgotten(job):
            forgotten.append(job.name)
    return forgotten


def _is_forgotten(job: KeptJob) -> bool:
    try:
        forget(job)
    except (CheckpointError, OSError):  # it has begun again, or another rank is at it
        return False
    return True


def _found(root: Path) -> Iterator[KeptJob]:
    if not root.is_dir():
        return
    for folder in root.iterdir():
        try:
            if not is_private(os.lstat(folder), stat.S_ISDIR):
                continue
            files = [path.lstat() for path in files_under(folder)]
            holder = lock.owner_of(folder)
        except (OSError, CheckpointError):  # removed meanwhile, or not ours to read
            continue
        size = sum(each.st_blocks * 512 for each in files)
        used = max((each.st_mtime for each in files), default=folder.lstat().st_mtime)
        yield KeptJob(folder, size, used, None if holder is None else str(holder))
