"""Locates checkpoints in a machine's memory, and limits how much of it they take (paper, section 8).

Files in the shared-memory file system outlive a killed trainer. Segments of ``multiprocessing.shared_memory``
do not, because its tracker removes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torchscout.checkpoint.storage.shard_files import files_under
from torchscout.config import JOB_NAME
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import make_private_folder
from torchscout.utils.procfs import available_memory, is_in_memory

__all__ = ["budget_within", "check_budget", "memory_folder", "memory_root"]

_VARIABLE = "TORCHSCOUT_MEMORY"
_SHARED_MEMORY = Path("/dev/shm")


def memory_root() -> Path:
    """The parent of all folders of this user's jobs; it need not exist yet."""
    root = os.environ.get(_VARIABLE)
    return Path(root) if root else _SHARED_MEMORY / f"torchscout-checkpoints-{os.geteuid()}"


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
        limit = (
            f"half of the {_size(free)} free" if budget is None else f"memory_budget; {_size(free)} are free"
        )
        raise CheckpointError(
            f"checkpoints in memory need {copies} x {_size(bytes_per_snapshot)} = {_size(needed)} "
            f"in {folder}, and {_size(allowed)} are allowed ({limit}); "
            "set memory_budget, or enlarge that file system"
        )
    return allowed


def _size(count: float) -> str:
    units = ["bytes", "KiB", "MiB", "GiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.4g} {units[0]}"
