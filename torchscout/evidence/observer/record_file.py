"""The file behind a progress record: made, opened, and removed when its trainer is dead (paper, section 7).

A plain file that both ends map, because segments of ``multiprocessing.shared_memory`` are unlinked
by its tracker when a worker is killed. Only its owner can use it, and its name cannot be guessed.
"""

from __future__ import annotations

import mmap
import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

from torchscout.decision.progress import Process
from torchscout.evidence.observer.layout import HEADER, SIZE
from torchscout.evidence.observer.liveness import Identity
from torchscout.private_files import is_private

__all__ = ["Opened", "create", "news_of", "open_record", "operations_of", "reclaim", "records_home"]

_MAGIC = b"SCOUTrec"
_VERSION = 3
_PREFIX = "progress-"
_VARIABLE = "TORCHSCOUT_RECORDS"


class Opened(NamedTuple):
    """A record, from the reader's side."""

    memory: mmap.mmap
    rank: int
    trainer: Identity


def records_home() -> Path:
    """Where the records of this user's trainers are, or will be: in memory, where that looks like one.

    The environment variable ``TORCHSCOUT_RECORDS`` names another folder.
    """
    if named := os.environ.get(_VARIABLE):
        return Path(named)
    root = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    return root / f"torchscout-{os.getuid()}"


def create(directory: Path, rank: int) -> tuple[Path, mmap.mmap]:
    """A new record of this process, in a directory that only its owner can use; it is made if need be."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(os.lstat(directory), stat.S_ISDIR):
        raise ValueError(f"{directory} must be a directory that belongs to this user alone (mode 0700)")
    path = directory / f"{_PREFIX}{rank}-{os.urandom(16).hex()}"
    header = HEADER.pack(_MAGIC, _VERSION, rank, *Identity.own())
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # The owner first: to ``reclaim`` a file without one is a file in the making.
        os.write(file, header)
        # Not merely extended: a full file system must say so here, not by a signal at some write later.
        os.posix_fallocate(file, 0, SIZE)
        return path, mmap.mmap(file, SIZE)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)


def operations_of(path: Path) -> Path:
    """The file beside a record that holds what the Flight Recorder said, if anything."""
    return path.with_name(f"operations-{path.name}")


def news_of(path: Path) -> Path:
    """The file beside a record in which the observer tells its trainer what the observers have found."""
    return path.with_name(f"news-{path.name}")


def open_record(path: Path) -> Opened:
    """Map a record for reading; a ``ValueError`` says what is foreign about the file."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not is_private(os.fstat(file), stat.S_ISREG):
            raise ValueError(f"{path} is not a file that belongs to this user alone (mode 0600)")
        rank, trainer = _header(file, path)
        size = os.fstat(file).st_size
        if size != SIZE:
            raise ValueError(f"{path} has {size} bytes, a progress record has {SIZE}")
        return Opened(mmap.mmap(file, SIZE, prot=mmap.PROT_READ), rank, trainer)
    finally:
        os.close(file)


def reclaim(directory: Path) -> list[Path]:
    """Remove the records of dead processes; returns them. Whoever has one open can read on."""
    try:
        paths = sorted(directory.iterdir())
    except OSError:  # another rank has cleared it away meanwhile, or it is not a folder of ours
        return []
    abandoned = [path for path in paths if path.name.startswith(_PREFIX) and _is_abandoned(path)]
    for path in abandoned:
        path.unlink(missing_ok=True)
    return abandoned


def _is_abandoned(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone by now, or a link, which is none of ours
        return False
    try:
        return _header(file, path)[1].process() is Process.GONE
    except ValueError:
        return False
    finally:
        os.close(file)


def _header(file: int, path: Path) -> tuple[int, Identity]:
    header = os.pread(file, HEADER.size, 0)
    if len(header) < HEADER.size or not header.startswith(_MAGIC):
        raise ValueError(f"{path} is not a progress record")
    _, version, rank, *identity = HEADER.unpack(header)
    if version != _VERSION:
        raise ValueError(f"{path} is a progress record of version {version}, this one reads {_VERSION}")
    return rank, Identity(*identity)
