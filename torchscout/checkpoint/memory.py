"""Checkpoints in a machine's memory: where they are, how much of it they may take, and which jobs have left
some (paper, section 8).

Files in the shared-memory file system outlive a killed trainer, so that its job can resume from them; but
some jobs are never started again. Segments of ``multiprocessing.shared_memory`` do not, because its tracker
removes them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchscout.checkpoint.folder import LOCK, claim, owner_of
from torchscout.checkpoint.storage.shard_files import files_under
from torchscout.config import JOB_NAME
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import is_private, make_private_folder
from torchscout.utils.procfs import available_memory, is_in_memory
from torchscout.utils.text import size_in_words

__all__ = [
    "KeptJob",
    "budget_within",
    "check_budget",
    "forget",
    "forget_old",
    "kept_jobs",
    "memory_folder",
    "memory_root",
    "taken_root",
]

_VARIABLE = "TORCHSCOUT_MEMORY"
_SHARED_MEMORY = Path("/dev/shm")
_NAMES = 100
_DAY_SECONDS = 86400.0


def memory_root() -> Path:
    """The parent of all folders of this user's jobs; it need not exist yet.

    Any user may create a folder with its usual name. Then a numbered name is taken instead: the first one
    that is private to this user, or else the first that is free. So all processes of this user on a machine
    find the same one, also in the next run.
    """
    if root := os.environ.get(_VARIABLE):
        return Path(root)
    usual = _usual_root()
    free = None
    for path in (usual, *(usual.with_name(f"{usual.name}.{number}") for number in range(1, _NAMES))):
        is_own = _is_own(path)  # asked once: another rank may create it now
        if is_own:
            return path
        if is_own is None and free is None:
            free = path
    return free or usual


def taken_root(root: Path) -> str | None:
    """Why this root has a numbered name, in a sentence; None if it does not."""
    usual = _usual_root()
    if root.parent != usual.parent or not root.name.startswith(f"{usual.name}."):
        return None
    return (
        f"checkpoints in memory are in {root}, because {usual} is not a folder that belongs to this user "
        "alone (0700); delete that, or have its owner do so"
    )


def _is_own(folder: Path) -> bool | None:
    """Whether this folder is private to this user; None if there is none."""
    try:
        return is_private(os.lstat(folder), stat.S_ISDIR)
    except FileNotFoundError:
        return None


def _usual_root() -> Path:
    return _SHARED_MEMORY / f"torchscout-checkpoints-{os.geteuid()}"


def memory_folder(job: str) -> Path:
    """A job's private folder in this machine's memory, created if missing.

    The environment variable ``TORCHSCOUT_MEMORY`` overrides the root, a folder in ``/dev/shm``. Raises
    ``ValueError`` for an invalid job name, ``CheckpointError`` if the folder cannot be created.
    """
    if not JOB_NAME.fullmatch(job):
        raise ValueError(f"a job's name has at most 128 letters, digits and ._+=@-, got {job!r}")
    root = memory_root()
    if not os.environ.get(_VARIABLE) and not _SHARED_MEMORY.is_dir():
        raise CheckpointError(f"there is no {_SHARED_MEMORY} here; set {_VARIABLE} to a folder in memory")
    try:
        make_private_folder(root, parents=True)
        make_private_folder(root / job)
    except OSError as error:
        raise CheckpointError(f"cannot keep checkpoints in {error.filename}: {error.strerror}") from error
    return root / job


def check_budget(
    bytes_per_snapshot: int,
    copies: int,
    budget: int | None,
    folder: Path,
    available: Callable[[], int] = available_memory,
) -> int:
    """Return the bytes that checkpoints may take; raises ``CheckpointError`` if the copies do not fit.

    ``copies`` counts all snapshots that this machine may hold, of all its ranks. Earlier checkpoints of this
    job count as free, because new ones replace them. The default budget is half of the free memory, or as
    much as the earlier checkpoints take: a job that is started again may have the memory that it had.
    """
    try:
        status = os.statvfs(folder)
        own = sum(map(_allocated, files_under(folder)))
    except OSError as error:
        raise CheckpointError(f"cannot determine the free memory of {folder}: {error.strerror}") from error
    free = status.f_bavail * status.f_frsize
    if is_in_memory(folder):  # its size may exceed the memory of the machine or container
        free = min(free, available())
    return budget_within(free + own, bytes_per_snapshot, copies, budget, folder, own=own)


def _allocated(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0  # another rank has just removed it


def budget_within(
    free: int, bytes_per_snapshot: int, copies: int, budget: int | None, folder: Path, *, own: int = 0
) -> int:
    """``check_budget`` with this many bytes free, of which this job's earlier checkpoints take ``own``; the
    folder is only named in the error."""
    allowed = max(free // 2, own) if budget is None else budget
    needed = bytes_per_snapshot * copies
    if needed > min(allowed, free):
        room = size_in_words(free)
        limit = f"half of the {room} free" if budget is None else f"memory_budget; {room} are free"
        raise CheckpointError(
            f"checkpoints in memory need {copies} x {size_in_words(bytes_per_snapshot)} = "
            f"{size_in_words(needed)} in {folder}, and {size_in_words(allowed)} are allowed ({limit}); "
            "set memory_budget, or enlarge that file system"
        )
    return allowed


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


def _found(root: Path) -> Iterator[KeptJob]:
    if not root.is_dir():
        return
    for folder in root.iterdir():
        try:
            if not _is_own(folder):
                continue
            files = [path.lstat() for path in files_under(folder)]
            holder = owner_of(folder)
        except (OSError, CheckpointError):  # removed meanwhile, or it is unknown whether a job uses it
            continue
        size = sum(each.st_blocks * 512 for each in files)
        used = max((each.st_mtime for each in files), default=folder.lstat().st_mtime)
        yield KeptJob(folder, size, used, None if holder is None else str(holder))


def forget(job: KeptJob) -> None:
    """Delete a job's folder; raises ``CheckpointError`` while a process of the job lives."""
    with claim(job.folder, "scout checkpoint forget"):
        # Whoever waits for the lock, or starts now, makes a new folder: see [Note: one run, many processes].
        unwanted = job.folder.with_name(f".{job.name}.{secrets.token_hex(4)}")
        job.folder.rename(unwanted)
        (unwanted / LOCK).unlink(missing_ok=True)
        shutil.rmtree(unwanted, ignore_errors=True)


def forget_old(root: Path, own: Path, days: float) -> list[str]:
    """Delete the folders of other jobs that were unused for ``days`` days, and return their names."""
    now = max((path.lstat().st_mtime for path in (own / LOCK, own) if path.exists()), default=0.0)
    forgotten = []
    for job in kept_jobs(root):
        if job.folder == own or job.holder is not None or now - job.used < days * _DAY_SECONDS:
            continue
        with suppress(CheckpointError, OSError):  # the job has restarted, or another rank is deleting it
            forget(job)
            forgotten.append(job.name)
    return forgotten
