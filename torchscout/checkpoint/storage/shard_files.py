"""Lists the shards in a folder by their names (paper, section 9); ``shards.verify`` checks their contents."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchscout.checkpoint.trust.generation import Generation
from torchscout.errors import CheckpointError

__all__ = ["ShardFile", "files_under", "shard_files"]

# The exact inverse of ``shards.path_of``: other spellings of a number do not match.
_NUMBER = r"(0|[1-9]\d{0,17})"
_FOLDER = re.compile(rf"step-0*{_NUMBER}\.lineage-{_NUMBER}")
_FILE = re.compile(rf"rank-{_NUMBER}-of-{_NUMBER}\.held-by-{_NUMBER}\.shard")


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


def shard_files(folder: Path | str) -> list[ShardFile]:
    """All shards in a folder, oldest generation first."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    found = [
        file
        for entry in entries
        if entry.is_dir(follow_symlinks=False) and (generation := _generation(entry.name))
        for file in _inside(Path(entry.path), generation)
    ]
    return sorted(found, key=lambda each: (each.generation, each.rank, each.holder, each.path))


def files_under(folder: Path | str) -> Iterator[Path]:
    """Every file in a folder and its subfolders. Unlike ``rglob``, it tolerates subfolders that vanish."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _generation(name: str) -> Generation | None:
    match = _FOLDER.fullmatch(name)
    if match is None or name != f"step-{int(match[1]):010d}.lineage-{match[2]}":
        return None
    return Generation(int(match[1]), int(match[2]))


def _inside(folder: Path, generation: Generation) -> Iterator[ShardFile]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    for entry in entries:
        if (match := _FILE.fullmatch(entry.name)) is None:
            continue
        yield ShardFile(Path(entry.path), generation, *map(int, match.groups()))
