"""Where checkpoints lie in a machine's memory, and how much of it they may take (paper, section 8).

The shared-memory file system outlives a killed trainer; segments of ``multiprocessing.shared_memory`` do
not, because its tracker removes them. It does not outlive the machine: replicas and files do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torchscout.checkpoint.storage import lock, shards
from torchscout.checkpoint.storage.shard_files import files_under
from torchscout.config import JOB_NAME
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import make_private_folder
from torchscout.utils.procfs import available_memory, is_in_memory

__all__ = ["budget_within", "check_budget", "memory_folder", "memory_root"]

_VARIABLE = "TORCHSCOUT_MEMORY"
_SHARED_MEMORY = Path("/dev/shm")
_PROMISED = "budget"
"""The file with the number of bytes that a job may take."""


def memory_root() -> Path:
    """Where the folders of all jobs of this user are, or will be."""
    told = os.environ.get(_VARIABLE)
    return Path(told) if told else _SHARED_MEMORY / f"torchscout-checkpoints-{os.geteuid()}"


def memory_folder(job: str) -> Path:
    """The folder of a job's checkpoints in this machine's memory, its owner's alone; made if missing.

    The environment variable ``TORCHSCOUT_MEMORY`` names another root than one in ``/dev/shm``.
    """
    if not JOB_NAME.fullmatch(job):
        raise ValueError(f"a job's name is of letters, digits and ._+=@-, at most 128, got {job!r}")
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
    """The bytes that checkpoints may take, or a ``CheckpointError`` if so many copies do not fit into them.

    ``copies`` counts all that this machine is to hold, of all its ranks. Without a budget it is half of what
    is free; what this job's earlier checkpoints take counts as free, as they give way, and what other jobs
    that run may still take does not.
    """
    try:
        status = os.statvfs(folder)
        own = sum(map(_allocated, files_under(folder)))
    except OSError as error:
        raise CheckpointError(f"cannot tell how much memory {folder} has: {error.strerror}") from error
    free = status.f_bavail * status.f_frsize
    if is_in_memory(folder):  # that file system may be larger than what the machine or the container has
        free = min(free, available())
    free = max(0, free + own - _promised_to_others(folder))
    allowed = budget_within(free, bytes_per_snapshot, copies, budget, folder)
    with suppress(CheckpointError):  # a full file system is for the first capture to meet
        shards.replace(folder / _PROMISED, [f"{allowed}\n".encode()])
    return allowed


def _promised_to_others(folder: Path) -> int:
    """What the running jobs of the other folders may still take, besides what they have taken."""
    beside = [each for each in folder.parent.iterdir() if each != folder and each.is_dir()]
    return sum(_promised(each) for each in beside)


def _promised(folder: Path) -> int:
    try:
        if lock.owner_of(folder) is None:
            return 0
        allowed = int((folder / _PROMISED).read_bytes())
        return max(0, allowed - sum(map(_allocated, files_under(folder))))
    except (OSError, ValueError, CheckpointError):  # it ends at this moment, or is not ours to read
        return 0


def _allocated(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0  # another rank of this machine has just removed it


def budget_within(free: int, bytes_per_snapshot: int, copies: int, budget: int | None, folder: Path) -> int:
    """``check_budget`` where so many bytes are free. Pure: the folder is only named."""
    allowed = free // 2 if budget is None else budget
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
