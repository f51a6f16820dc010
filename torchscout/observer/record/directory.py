"""The files behind progress records (paper, section 7). Needs Linux.

A progress record is a plain file that both ends map. Segments of ``multiprocessing.shared_memory`` would be
unlinked by its tracker when a worker is killed. Only its owner can use the file, and nobody can guess its
name.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

from torchscout.decision.progress import Process
from torchscout.observer.record.layout import HEADER, SIZE
from torchscout.utils import procfs
from torchscout.utils.private_files import is_private

__all__ = [
    "Opened",
    "ProcessIdentity",
    "create",
    "news_of",
    "open_record",
    "operations_of",
    "reclaim",
    "records_home",
]

_MAGIC = b"SCOUTrec"
_VERSION = 3
_PREFIX = "progress-"
_VARIABLE = "TORCHSCOUT_RECORDS"


class ProcessIdentity(NamedTuple):
    """Identifies one process of one machine, also after its process id was reused."""

    pid: int
    started: int
    """When it began, in clock ticks since the boot: a recycled ``pid`` has another."""
    boot: bytes
    """The machine's boot, 16 bytes: ticks of different boots cannot be compared."""

    @classmethod
    def own(cls) -> ProcessIdentity:
        stat = procfs.process_stat(os.getpid())
        assert stat is not None, "a process finds itself in /proc"
        return cls(os.getpid(), stat.started, procfs.boot_id())

    def process(self) -> Process:
        """Return the state of the process now; one that is blocked in the kernel counts as running."""
        try:
            stat = procfs.process_stat(self.pid)
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE}:
                raise
            return Process.RUNNING  # no descriptor is left to look with; its pidfd still tells of its end
        if stat is None or (stat.started, procfs.boot_id()) != (self.started, self.boot) or stat.has_ended:
            return Process.GONE
        return Process.STOPPED if stat.is_stopped else Process.RUNNING


class Opened(NamedTuple):
    """A record that was opened for reading."""

    memory: mmap.mmap
    rank: int
    trainer: ProcessIdentity


def records_home() -> Path:
    """Return the folder for the records of this user's trainers: ``TORCHSCOUT_RECORDS`` if it is set, or one
    in shared memory where there is some."""
    if named := os.environ.get(_VARIABLE):
        return Path(named)
    root = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    return root / f"torchscout-{os.getuid()}"


def create(directory: Path, rank: int) -> tuple[Path, mmap.mmap]:
    """Create a record for this process in an owner-only directory, which is made if it does not exist.

    Raises ``ValueError`` if others can use the directory, and ``OSError`` if there is no room.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(os.lstat(directory), stat.S_ISDIR):
        raise ValueError(f"{directory} must be a directory that belongs to this user alone (mode 0700)")
    path = directory / f"{_PREFIX}{rank}-{os.urandom(16).hex()}"
    header = HEADER.pack(_MAGIC, _VERSION, rank, *ProcessIdentity.own())
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # The header comes first: ``reclaim`` leaves a file without one alone.
        os.write(file, header)
        # Allocated, not merely extended: a full file system must fail here, not by a signal at a later write.
        os.posix_fallocate(file, 0, SIZE)
        return path, mmap.mmap(file, SIZE)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)


def operations_of(path: Path) -> Path:
    """Return the file beside a record that holds the output of the Flight Recorder, if there is any."""
    return path.with_name(f"operations-{path.name}")


def news_of(path: Path) -> Path:
    """Return the file beside a record in which the observer tells its trainer what the observers found."""
    return path.with_name(f"news-{path.name}")


def open_record(path: Path) -> Opened:
    """Map a record for reading; raises ``ValueError`` if the file is not a record of this user."""
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
    """Remove the records of dead processes and return their paths. Open mappings stay readable."""
    try:
        paths = sorted(directory.iterdir())
    except OSError:  # another rank has removed it, or it is not a folder of ours
        return []
    abandoned = [path for path in paths if path.name.startswith(_PREFIX) and _is_abandoned(path)]
    for path in abandoned:
        path.unlink(missing_ok=True)
    return abandoned


def _is_abandoned(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it is gone, or a link, which is not ours
        return False
    try:
        return _header(file, path)[1].process() is Process.GONE
    except ValueError:
        return False
    finally:
        os.close(file)


def _header(file: int, path: Path) -> tuple[int, ProcessIdentity]:
    header = os.pread(file, HEADER.size, 0)
    if len(header) < HEADER.size or not header.startswith(_MAGIC):
        raise ValueError(f"{path} is not a progress record")
    _, version, rank, *identity = HEADER.unpack(header)
    if version != _VERSION:
        raise ValueError(f"{path} is a progress record of version {version}, this one reads {_VERSION}")
    return rank, ProcessIdentity(*identity)
