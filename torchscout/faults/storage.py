"""Damages checkpoint files and snapshots in memory, and fills disks (paper, section 8).

Such a fault causes no incident. A damaged copy must never be loaded, its path must be reported, and the job
must resume from another copy or an older generation.
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

from torchscout.checkpoint.storage import shards
from torchscout.errors import CheckpointError

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
    """Damages a file."""

    @abstractmethod
    def happen(self, path: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class FlipFileBit(Damage):
    at: float
    """The position of the byte as a share of the file: 0 is the first and 1 the last."""
    bit: int = 3

    def happen(self, path: Path) -> None:
        data = bytearray(_contents(path))
        data[min(int(self.at * len(data)), len(data) - 1)] ^= 1 << self.bit
        _rewrite(path, bytes(data))


@dataclass(frozen=True, slots=True)
class Cut(Damage):
    """Truncates a file, as when the machine goes down while it is written."""

    at: float
    """The share of the file that is left."""

    def happen(self, path: Path) -> None:
        data = _contents(path)
        _rewrite(path, data[: int(self.at * len(data))])


@dataclass(frozen=True, slots=True)
class Delete(Damage):
    def happen(self, path: Path) -> None:
        path.unlink()


@dataclass(frozen=True, slots=True)
class Lost:
    """Files that a job that resumes must not load, and must report."""

    paths: tuple[Path, ...]
    damage: Damage

    def is_reported_in(self, problems: Iterable[str]) -> bool:
        """Whether each damaged file is reported; deleted files cannot be."""
        text = "\n".join(problems)
        return isinstance(self.damage, Delete) or all(str(path) in text for path in self.paths)


def copies(
    folders: Sequence[Path], rank: int, step: int, *, lineage: int = 0, holder: int | None = None
) -> list[Path]:
    """The shards of a rank's state after a step in these folders, of one holder or of all."""
    by = "*" if holder is None else holder
    name = f"step-{step:010d}.lineage-{lineage}/rank-{rank}-of-*.held-by-{by}.shard"
    return [path for folder in folders for path in sorted(folder.glob(name))]


def spoil(paths: Sequence[Path], damage: Damage) -> Lost:
    """Damage all of these files. Raises ``ValueError`` if there are none, as a test would prove nothing."""
    if not paths:
        raise ValueError(f"there is no file to apply {damage} to")
    for path in paths:
        damage.happen(path)
    return Lost(tuple(paths), damage)


def lose_folder(folder: Path) -> None:
    """Make a folder unwritable, as when a network file system goes away under a running job."""
    folder.rename(_aside(folder))
    while not folder.is_file():
        shutil.rmtree(folder, ignore_errors=True)  # a writer may have created it again
        with suppress(IsADirectoryError):
            folder.touch()


def restore_folder(folder: Path) -> None:
    """Undo ``lose_folder``."""
    folder.unlink()
    _aside(folder).rename(folder)


def block_ledger(memory: Path, rank: int) -> None:
    """Make it impossible to replace a rank's ledgers under this folder, even for root."""
    for path in [*memory.rglob(f"rank-{rank}.ledger")]:
        before = path.with_name(f"{path.name}.previous")
        before.unlink(missing_ok=True)
        (before / "in the way").mkdir(parents=True)


def fill_file_system(folder: Path) -> None:
    """Fill the file system of this folder, which must be small."""
    if os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize > _SMALL:
        raise ValueError(f"the file system of {folder} is larger than {_SMALL} bytes")
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def can_fill_disks() -> bool:
    """Whether an ordinary user can mount a file system of a given size on this machine."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_UNSHARED, "true"], check=False, capture_output=True).returncode == 0


def on_a_small_disk(folder: Path, kilobytes: int, command: Sequence[str]) -> list[str]:
    """A command line that runs ``command`` with a file system of that size mounted on ``folder``."""
    script = f'mount -t tmpfs -o mode=0700,size={kilobytes}k tmpfs "$0" && exec "$@"'
    return [*_UNSHARED, "sh", "-c", script, str(folder), *command]


_SMALL = 64 << 20
_UNSHARED = ["unshare", "--user", "--map-root-user", "--mount"]


def _aside(folder: Path) -> Path:
    return folder.with_suffix(".lost")


def _contents(path: Path) -> bytes:
    """The bytes of a file; of a shard, without the head room that follows it in memory."""
    try:
        return path.read_bytes()[: shards.inspect(path).size]
    except CheckpointError:  # it is no shard, or damaged already
        return path.read_bytes()


def _rewrite(path: Path, data: bytes) -> None:
    """Write to the same file, so that processes that have it open see it. Sealed files are not writable."""
    path.chmod(0o600)
    path.write_bytes(data)
