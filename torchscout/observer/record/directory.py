"""The files behind progress records and the list of ranks: created, opened, and removed when their trainer is
dead (paper, section 7).

A plain file that both ends map, because segments of ``multiprocessing.shared_memory`` are unlinked by its
tracker when a worker is killed. Only its owner can use it, and its name cannot be guessed. Whether a
process still lives is read from ``/proc``, so this needs Linux; a process that is blocked in the kernel
counts as running. The run directory has one small file per rank that says where it runs, and one that says
how it ended: a session that is closed writes its own, and for a trainer that ended in any other way its
observer does.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import socket
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from torchscout.decision.progress import Process
from torchscout.observer.record.layout import HEADER, SIZE
from torchscout.utils import procfs
from torchscout.utils.private_files import is_private, make_folders, replace_text

__all__ = [
    "End",
    "How",
    "Opened",
    "ProcessIdentity",
    "RankEntry",
    "create",
    "news_of",
    "open_record",
    "operations_of",
    "read_ends",
    "read_roster",
    "reclaim",
    "records_home",
]

_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE}


class ProcessIdentity(NamedTuple):
    """One process of one machine, never confused with a later one."""

    pid: int
    started: int
    """When it began, in clock ticks since the boot: a recycled ``pid`` has another."""
    boot: bytes
    """The machine's boot, 16 bytes: ticks of different boots say nothing."""

    @classmethod
    def own(cls) -> ProcessIdentity:
        stat = procfs.process_stat(os.getpid())
        assert stat is not None, "a process finds itself in /proc"
        return cls(os.getpid(), stat.started, procfs.boot_id())

    def process(self) -> Process:
        """What the operating system says of it now."""
        try:
            stat = procfs.process_stat(self.pid)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
            return Process.RUNNING  # as far as is known; its pidfd tells of its end all the same
        if stat is None or (stat.started, procfs.boot_id()) != (self.started, self.boot) or stat.has_ended:
            return Process.GONE
        return Process.STOPPED if stat.is_stopped else Process.RUNNING


_MAGIC = b"SCOUTrec"
_VERSION = 3
_PREFIX = "progress-"
_VARIABLE = "TORCHSCOUT_RECORDS"


class Opened(NamedTuple):
    """A record, from the reader's side."""

    memory: mmap.mmap
    rank: int
    trainer: ProcessIdentity


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
    header = HEADER.pack(_MAGIC, _VERSION, rank, *ProcessIdentity.own())
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


def _header(file: int, path: Path) -> tuple[int, ProcessIdentity]:
    header = os.pread(file, HEADER.size, 0)
    if len(header) < HEADER.size or not header.startswith(_MAGIC):
        raise ValueError(f"{path} is not a progress record")
    _, version, rank, *identity = HEADER.unpack(header)
    if version != _VERSION:
        raise ValueError(f"{path} is a progress record of version {version}, this one reads {_VERSION}")
    return rank, ProcessIdentity(*identity)


_SESSION = "session-"


@dataclass(frozen=True, slots=True)
class RankEntry:
    """Where one rank can be looked at."""

    rank: int
    host: str
    pid: int
    record: str
    """Its progress record, on that host; it is gone once the rank has finished. Where there is no observer,
    a name that stands for the session."""
    size: int = 0
    """Ranks in the job; 0 where that is not known."""
    started: int = 0
    """When its process began, in clock ticks since the boot: a recycled ``pid`` has another."""

    @classmethod
    def own(cls, rank: int, record: Path | None, size: int = 0) -> RankEntry:
        """Of this process; without an observer there is no ``record``."""
        name = f"{_SESSION}{secrets.token_hex(16)}" if record is None else str(record)
        return cls(rank, socket.gethostname(), os.getpid(), name, size, ProcessIdentity.own().started)

    @property
    def has_no_observer(self) -> bool:
        return self.record.startswith(_SESSION)

    def process(self) -> Process:
        """What the operating system says of its process; only on the same host."""
        return ProcessIdentity(self.pid, self.started, ProcessIdentity.own().boot).process()

    def write(self, run_dir: Path) -> None:
        path = run_dir / "ranks" / f"rank-{self.rank}.json"
        make_folders(path.parent)
        replace_text(path, json.dumps(asdict(self)) + "\n")


def read_roster(run_dir: Path) -> list[RankEntry]:
    """Every rank's entry, by rank; a ``ValueError`` names a file that is none."""
    folder = run_dir / "ranks"
    paths = folder.iterdir() if folder.is_dir() else ()  # unlike ``glob``, it says what may not be read
    found = [_entry(path) for path in paths if path.match("rank-*.json")]
    return sorted(found, key=lambda entry: entry.rank)


def _entry(path: Path) -> RankEntry:
    try:
        entry = RankEntry(**json.loads(path.read_text()))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a rank's entry: {error}") from error
    if not all(isinstance(each, int) for each in (entry.rank, entry.pid, entry.size, entry.started)):
        raise ValueError(f"{path} is not a rank's entry: rank {entry.rank!r:.40}, pid {entry.pid!r:.40}")
    if not all(isinstance(each, str) and "\0" not in each for each in (entry.host, entry.record)):
        raise ValueError(f"{path} is not a rank's entry: it names {entry.record!r:.80}")
    return entry


How = Literal["finished", "interrupted", "failed", "killed"]
"""``interrupted``: by SIGINT, SIGTERM or SIGHUP. ``failed``: by an exception or a non-zero exit status.
``killed``: by any other signal, or nobody could tell."""


@dataclass(frozen=True, slots=True)
class End:
    """Of one rank."""

    rank: int
    how: How
    step: int
    """Training steps that it had finished."""
    record: str
    """The progress record of the session that ended, as in the rank's entry: another one's end is out of
    date."""
    why: str = ""
    """The exception, where there was one."""

    def write(self, run_dir: Path) -> None:
        """An ``OSError`` if it cannot be written."""
        path = _path(run_dir, self.rank)
        make_folders(path.parent)
        replace_text(path, json.dumps(asdict(self)) + "\n")

    def is_written(self, run_dir: Path) -> bool:
        """Whether there is an end of the same session."""
        found = _read(_path(run_dir, self.rank))
        return found is not None and found.record == self.record


def read_ends(run_dir: Path) -> dict[int, End]:
    """By rank; what is not an end is left out."""
    folder = run_dir / "ends"
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [_read(path) for path in paths if path.match("rank-*.json")]
    return {each.rank: each for each in found if each is not None}


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / "ends" / f"rank-{rank}.json"


def _read(path: Path) -> End | None:
    try:
        end = End(**json.loads(path.read_text()))
    except (OSError, TypeError, ValueError, RecursionError):
        return None
    is_sound = type(end.rank) is int and type(end.step) is int and end.how in get_args(How)
    return end if is_sound and isinstance(end.why, str) else None
