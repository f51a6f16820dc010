"""Deletes the shards of generations that nobody needs (paper, section 8). Which those are, the gate says."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.storage.shard_files import ShardFile, shard_files
from torchscout.errors import CheckpointError

__all__ = ["remove", "retire"]

_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}


def retire(folder: Path | str, generations: Iterable[Generation], rank: int | None = None) -> list[Path]:
    """Delete these generations' shards, or of them only those that one rank holds; says what it deleted."""
    unwanted = frozenset(generations)
    if not Path(folder).is_dir():
        return []
    return remove(
        each
        for each in shard_files(folder)
        if each.generation in unwanted and (rank is None or each.holder == rank)
    )


def remove(unwanted: Iterable[ShardFile]) -> list[Path]:
    """Delete these copies and the step folders left empty, as many as can be; then say which could not."""
    removed, problems = [], []
    for path in [each.path for each in unwanted]:
        if problem := _gone(path):
            problems.append(problem)
        else:
            removed.append(path)
    for parent in sorted({path.parent for path in removed}):
        problems += filter(None, [_without_folder(parent)])
    if problems:
        raise CheckpointError(f"{len(problems)} could not be deleted; {problems[0]}")
    return removed


def _gone(path: Path) -> str | None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def _without_folder(folder: Path) -> str | None:
    """A folder in which something else lies, a file that is being written say, stays."""
    try:
        folder.rmdir()
    except OSError as error:
        return None if error.errno in _NOT_EMPTY else f"{folder}: {error.strerror}"
    return None
