"""Lists the shards in a folder by their names, and deletes them (paper, section 9); ``shards.verify`` checks
their contents."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchscout.checkpoint.gate import Generation
from torchscout.errors import CheckpointError

__all__ = ["ShardFile", "files_under", "remove_shards", "shard_files"]

# The exact inverse of ``shards.path_of``: other spellings of a number do not match.
_NUMBER = r"(0|[1-9]\d{0,17})"
_GONE = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}
_FOLDER = re.compile(rf"step-0*{_NUMBER}\.lineage-{_NUMBER}")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One copy of one rank's shard."""

    path: Path
    generation: Generation
    rank: int
    """The rank whose state it is."""
    world_size: int
    holder: int
    """The rank that keeps this copy."""

    @property
    def is_replica(self) -> bool:
        return self.holder != self.rank

    @property
    def size(self) -> int:
        """In bytes; 0 if the file has vanished. A listing does without, since every rank lists the shards of
        all ranks if they share a disk."""
        try:
            return self.path.lstat().st_size
        except FileNotFoundError:
            return 0


# [Note: listing no more than is needed]
#
# If all ranks share a disk, a generation has as many files as the job has ranks, and every rank deletes its
# own. With 16,384 ranks and four generations, listing all of them took a trainer 0.8 s of Python at every
# checkpoint. So generations that are not wanted are not read, and other ranks' files are only skipped.


def shard_files(
    folder: Path | str,
    wanted: Callable[[Generation], bool] = lambda _: True,
    *,
    owner: int | None = None,
    holder: int | None = None,
) -> list[ShardFile]:
    """The shards in a folder, oldest generation first: of the wanted generations, or of all; of one rank's
    state, kept by one rank, or of every rank."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    name = re.compile(rf"rank-{_number(owner)}-of-{_NUMBER}\.held-by-{_number(holder)}\.shard")
    found = [
        file
        for entry in entries
        if (generation := _generation(entry.name)) and wanted(generation)
        if entry.is_dir(follow_symlinks=False)
        for file in _inside(Path(entry.path), generation, name)
    ]
    return sorted(found, key=lambda each: (each.generation, each.rank, each.holder, each.path))


def remove_shards(unwanted: Iterable[ShardFile]) -> list[Path]:
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
        return None if error.errno in _GONE else f"{path}: {error.strerror}"
    return None


def files_under(folder: Path | str) -> Iterator[Path]:
    """Every file in a folder and its subfolders. Unlike ``rglob``, it tolerates subfolders that vanish."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _generation(name: str) -> Generation | None:
    match = _FOLDER.fullmatch(name)
    if match is None or name != f"step-{int(match[1]):010d}.lineage-{match[2]}":
        return None
    return Generation(int(match[1]), int(match[2]))


def _number(number: int | None) -> str:
    return _NUMBER if number is None else f"({number})"


def _inside(folder: Path, generation: Generation, name: re.Pattern[str]) -> Iterator[ShardFile]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    for entry in entries:
        if (match := name.fullmatch(entry.name)) is not None:
            yield ShardFile(Path(entry.path), generation, *map(int, match.groups()))
