"""Whether state finds room in memory and on disk, and nobody else reads it (paper, section 8)."""

from __future__ import annotations

from torchscout.checkpoint.replication.placement import copies_beside
from torchscout.checkpoint.storage.memory import budget_within
from torchscout.cli.checkpoint.wording import size_in_words
from torchscout.cli.doctor.facts import Finding, Folder, JobDescription, fail, ok, skipped, warn
from torchscout.errors import CheckpointError

__all__ = ["directory", "memory", "private"]

_CONTAINER_DEFAULT = 64 << 20
"""What container engines give /dev/shm if nobody says otherwise."""
_GENERATIONS = 3
"""In files: the newest, an older one, and one that is being written."""


def memory(folder: Folder, plan: JobDescription) -> Finding:
    """Room for snapshots of all ranks of this machine, and for copies of others' if there are others."""
    name = "shared memory"
    where = f"{folder.path}, {size_in_words(folder.free)} of {size_in_words(folder.size)} free"
    enlarge = "--shm-size of a container, size= of a tmpfs, or TORCHSCOUT_MEMORY, which names another folder"
    if folder.problem is not None:
        return fail(name, f"nothing can be kept in it: {folder.problem}", enlarge)
    if plan.state_bytes is not None:
        copies = copies_beside(plan.hosts, 0, replicate=True)
        try:
            budget_within(folder.free, plan.state_bytes, copies, None, folder.path)
        except CheckpointError as error:
            return fail(name, str(error), enlarge)
        where += f"; {copies} copies of {size_in_words(plan.state_bytes)} fit"
    elif folder.size <= _CONTAINER_DEFAULT:
        return warn(name, f"{where}, as containers have it if nobody asks for more", enlarge)
    if not folder.in_memory:
        return warn(
            name,
            f"{where}: this is a disk, slow and no safer than checkpoint files",
            "let TORCHSCOUT_MEMORY name a folder in memory, or leave it unset",
        )
    return ok(name, where)


def private(folders: list[Folder]) -> Finding:
    """Records and checkpoints in memory are their owner's alone, or torchscout refuses to use the folder."""
    open_ = [each for each in folders if each.is_private is False]
    if not open_:
        there = [str(each.path) for each in folders if each.exists] or ["what is made in memory"]
        return ok("permissions", f"nobody else can look into {' and '.join(there)}")
    first = open_[0]
    if not first.exists:
        return fail(
            "permissions",
            f"a folder made for {first.path} with mode 0700 is not its owner's alone",
            "use a file system that keeps owners and modes",
        )
    return fail(
        "permissions",
        f"{first.path} is not a folder that belongs to this user alone",
        f"chmod 0700 {first.path}, or remove it if it is somebody else's",
    )


def directory(folder: Folder | None, plan: JobDescription) -> Finding:
    """Of ``CheckpointConfig.directory``."""
    name = "checkpoint folder"
    if folder is None:
        return skipped(name, "give --checkpoint DIR to have it tried")
    if folder.problem is not None:
        return fail(
            name, f"nothing can be written: {folder.problem}", "choose another, or let this user write there"
        )
    if folder.holder is not None:
        return fail(
            name, f"{folder.path} is in use by {folder.holder}", "wait for it, end it, or use another folder"
        )
    where = f"{folder.path}, {size_in_words(folder.free)} free"
    if plan.state_bytes is not None:
        generation = plan.state_bytes * plan.ranks
        if folder.free < _GENERATIONS * generation:
            grade = fail if folder.free < generation else warn
            return grade(
                name,
                f"{where}; {_GENERATIONS} generations of this machine's ranks take "
                f"{size_in_words(_GENERATIONS * generation)}",
                "make room, or choose a larger file system",
            )
    if folder.locks is False:
        return warn(
            name,
            f"{where}; its file system has no locks, so that two jobs are told apart by names only",
            "let only one job use this folder",
        )
    return ok(name, where if folder.exists else f"{where}; it can be made")
