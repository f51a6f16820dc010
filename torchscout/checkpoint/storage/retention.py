"""Deletes shards, and what ended jobs have left in memory (paper, section 8).

Memory stays when a job is killed, so that the job can resume from it;
but some jobs are never started again.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchscout.checkpoint.storage import lock
from torchscout.checkpoint.storage.shard_files import ShardFile, files_under
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import is_private

__all__ = ["KeptJob", "forget", "forget_old", "kept_jobs", "remove"]

_FINE = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}
_DAY_SECONDS = 86400.0


def remove(unwanted: Iterable[ShardFile]) -> list[Path]:
    """Delete these shards and the folders left empty, as many as possible, and return the shards' paths.

    Raises ``CheckpointError`` if some could not be deleted.
    """
    outcomes = {each.path: _problem(each.path.unlink, each.path) for each in unwanted}
    removed = [path for path, problem in outcomes.items() if problem is None]
    folders = sorted({path.parent for path in removed})
    problems = list(filter(None, (*outcomes.values(), *(_problem(each.rmdir, each) for each in folders))))
    if problems:
        raise CheckpointError(f"could not delete {len(problems)} files or folders; {problems[0]}")
    return removed


def _problem(delete: Callable[[], object], path: Path) -> str | None:
    """Delete it; returns why it could not be deleted. A file that is gone and a folder in use are fine."""
    try:
        delete()
    except OSError as error:
        return None if error.errno in _FINE else f"{path}: {error.strerror}"
    return None


@dataclass(frozen=True, slots=True)
class KeptJob:
    """One job's folder in memory."""

    folder: Path
    bytes: int
    used: float
    """When a file in it was last changed, by the file system's clock."""
    holder: str | None
    """The process that uses the folder, in words; None if it is not in use."""

    @property
    def name(self) -> str:
        return self.folder.name


def kept_jobs(root: Path) -> list[KeptJob]:
    """All jobs' folders in ``root``, by name; folders that are not private to this user are left out."""
    return sorted(_found(root), key=lambda job: job.name)


def forget(job: KeptJob) -> None:
    """Delete a job's folder; raises ``CheckpointError`` while a process of the job lives."""
    with lock.claim(job.folder, "scout checkpoint forget"):
        shutil.rmtree(job.folder, ignore_errors=True)


def forget_old(root: Path, own: Path, days: float) -> list[str]:
    """Delete the folders of other jobs that were unused for ``days`` days, and return their names."""
    now = max((path.lstat().st_mtime for path in (own / "lock", own) if path.exists()), default=0.0)
    forgotten = []
    for job in kept_jobs(root):
        if job.folder == own or job.holder is not None or now - job.used < days * _DAY_SECONDS:
            continue
        with suppress(CheckpointError, OSError):  # the job has restarted, or another rank is deleting it
            forget(job)
            forgotten.append(job.name)
    return forgotten


def _found(root: Path) -> Iterator[KeptJob]:
    if not root.is_dir():
        return
    for folder in root.iterdir():
        try:
            if not is_private(os.lstat(folder), stat.S_ISDIR):
                continue
            files = [path.lstat() for path in files_under(folder)]
            holder = lock.owner_of(folder)
        except (OSError, CheckpointError):  # removed meanwhile, or not readable
            continue
        size = sum(each.st_blocks * 512 for each in files)
        used = max((each.st_mtime for each in files), default=folder.lstat().st_mtime)
        yield KeptJob(folder, size, used, None if holder is None else str(holder))
