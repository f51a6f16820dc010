"""Deletes the shards of generations that the gate no longer needs (paper, section 8)."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path

from torchscout.checkpoint.storage.shard_files import ShardFile, shard_files
from torchscout.checkpoint.trust.generation import Generation
from torchscout.errors import CheckpointError

__all__ = ["remove", "retire"]

_FINE = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}


def retire(folder: Path | str, generations: Iterable[Generation], rank: int | None = None) -> list[Path]:
    """Delete these generations' shards, or only those that ``rank`` holds, and return their paths."""
    unwanted = frozenset(generations)
    if not Path(folder).is_dir():
        return []
    return remove(
        each
        for each in shard_files(folder)
        if each.generation in unwanted and (rank is None or each.holder == rank)
    )


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
