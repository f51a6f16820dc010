"""Damages real checkpoint files and memory snapshots, and makes disks that are full (paper, section 8).

Such a fault makes no incident: what must come of it is that the damaged copy is never loaded, that it is said
where the file is, and that the job goes on from another copy or an older generation. ``Lost`` says which.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Cut",
    "Damage",
    "Delete",
    "FlipFileBit",
    "Lost",
    "block_ledger",
    "can_fill_disks",
    "copies",
    "fill_file_system",
    "lose_folder",
    "on_a_small_disk",
    "restore_folder",
    "spoil",
]


class Damage(ABC):
    """Something that happens to a file."""

    @abstractmethod
    def happen(self, path: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class FlipFileBit(Damage):
    at: float
    """Which byte, as a share of the file: 0 is the first and 1 the last."""
    bit: int = 3

    def happen(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(int(self.at * len(data)), len(data) - 1)] ^= 1 << self.bit
        _rewrite(path, bytes(data))


@dataclass(frozen=True, slots=True)
class Cut(Damage):
    """What was not written when the machine went down."""

    at: float
    """What share of the file is left."""

    def happen(self, path: Path) -> None:
        _rewrite(path, path.read_bytes()[: int(self.at * path.stat().st_size)])


@dataclass(frozen=True, slots=True)
class Delete(Damage):
    def happen(self, path: Path) -> None:
        path.unlink()


@dataclass(frozen=True, slots=True)
class Lost:
    """What a job that resumes must not load, and must speak of."""

    paths: tuple[Path, ...]
    damage: Damage

    def is_reported_in(self, problems: Iterable[str]) -> bool:
        """Whether each damaged file is spoken of; of one that is not there nobody can know."""
        told = "\n".join(problems)
        return isinstance(self.damage, Delete) or all(str(path) in told for path in self.paths)


def copies(
    folders: Sequence[Path], rank: int, step: int, *, lineage: int = 0, holder: int | None = None
) -> list[Path]:
    """Where a rank's state after a step lies in these folders, of memory or disk; one holder's, or all."""
    held = "*" if holder is None else holder
    name = f"step-{step:010d}.lineage-{lineage}/rank-{rank}-of-*.held-by-{held}.shard"
    return [path for folder in folders for path in sorted(folder.glob(name))]


def spoil(paths: Sequence[Path], damage: Damage) -> Lost:
    """Damage every one of these files; a ``ValueError`` where there is none, which would prove nothing."""
    if not paths:
        raise ValueError(f"there is no file that {damage} could happen to")
    for path in paths:
        damage.happen(path)
    return Lost(tuple(paths), damage)


def lose_folder(folder: Path) -> None:
    """As when a network file system goes away under a running job: nothing can be written there."""
    folder.rename(_aside(folder))
    while not folder.is_file():
        shutil.rmtree(folder, ignore_errors=True)  # whoever was writing may have made it anew
        with suppress(IsADirectoryError):
            folder.touch()


def restore_folder(folder: Path) -> None:
    """It is back, as it was."""
    folder.unlink()
    _aside(folder).rename(folder)


def block_ledger(memory: Path, rank: int) -> None:
    """From now on a rank's ledger under this folder cannot be replaced, whoever the user is."""
    for path in [*memory.rglob(f"rank-{rank}.ledger")]:
        before = path.with_name(f"{path.name}.previous")
        before.unlink(missing_ok=True)
        (before / "in the way").mkdir(parents=True)


def fill_file_system(folder: Path) -> None:
    """Take all that is free where this folder lies. For a small file system of its own only."""
    if os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize > _SMALL:
        raise ValueError(f"the file system of {folder} is not a small one")
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def can_fill_disks() -> bool:
    """Whether this machine lets an ordinary user mount a file system of a certain size."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_UNSHARED, "true"], check=False, capture_output=True).returncode == 0


def on_a_small_disk(folder: Path, kilobytes: int, command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` with ``folder`` in a file system of its own, of that size."""
    script = f'mount -t tmpfs -o mode=0700,size={kilobytes}k tmpfs "$0" && exec "$@"'
    return [*_UNSHARED, "sh", "-c", script, str(folder), *command]


_SMALL = 64 << 20
_UNSHARED = ["unshare", "--user", "--map-root-user", "--mount"]


def _aside(folder: Path) -> Path:
    return folder.with_suffix(".lost")


def _rewrite(path: Path, data: bytes) -> None:
    """In the same file: whoever has it open sees it. Files that are sealed are not writable."""
    path.chmod(0o600)
    path.write_bytes(data)
