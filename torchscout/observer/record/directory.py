"""The files behind progress records, and each rank's entry and end in the run directory (paper, section 7).

A progress record is a plain file that both ends map. Segments of ``multiprocessing.shared_memory`` would be
unlinked by its tracker when a worker is killed. Only its owner can use the file, and nobody can guess its
name.

The run directory has a small file per rank that says where it runs, and one that says how it ended. A session
that is closed writes its own end; for a trainer that ended in any other way, its observer does. Needs Linux.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torchscout.decision.progress import Process
from torchscout.observer.record.layout import HEADER, SIZE
from torchscout.utils import procfs
from torchscout.utils.identity import host_name
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
    "read_end",
    "read_ends",
    "read_roster",
    "read_roster_entries",
    "reclaim",
    "records_home",
]

_MAGIC = b"SCOUTrec"
_VERSION = 3
_PREFIX = "progress-"
_VARIABLE = "TORCHSCOUT_RECORDS"
_SESSION = "session-"


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


@dataclass(frozen=True, slots=True)
class RankEntry:
    """Where one rank runs."""

    rank: int
    host: str
    pid: int
    record: str
    """Its progress record on that host, which is removed when the rank finishes; without an observer, a name
    that identifies the session."""
    size: int = 0
    """Number of ranks in the job; 0 if unknown."""
    started: int = 0
    """When its process began, in clock ticks since the boot: a recycled ``pid`` has another."""
    address: tuple[int, ...] = ()
    """Its coordinates along ``mesh.AXES``; empty if unknown."""
    hostname: str = ""
    """What the machine calls itself; ``host`` is what a scheduler calls it."""
    device: str = ""
    """See ``identity.device_name``; empty without an accelerator."""
    interface: str = ""
    """The network interface of the job's process groups; empty if unknown."""

    @classmethod
    def own(
        cls,
        rank: int,
        record: Path | None,
        size: int = 0,
        address: tuple[int, ...] = (),
        device: str = "",
        interface: str = "",
    ) -> RankEntry:
        """Return the entry of this process; ``record`` is None without an observer."""
        name = f"{_SESSION}{secrets.token_hex(16)}" if record is None else str(record)
        started = ProcessIdentity.own().started
        hostname = socket.gethostname()
        return cls(rank, host_name(), os.getpid(), name, size, started, address, hostname, device, interface)

    @property
    def is_here(self) -> bool:
        """Whether the rank runs on this machine."""
        return (self.hostname or self.host) == socket.gethostname()

    @property
    def has_no_observer(self) -> bool:
        return self.record.startswith(_SESSION)

    def process(self) -> Process:
        """Return the state of its process; only valid on the same host."""
        return ProcessIdentity(self.pid, self.started, procfs.boot_id()).process()

    def write(self, run_dir: Path) -> None:
        _write(run_dir / "ranks", self.rank, asdict(self))


def read_roster(run_dir: Path) -> list[RankEntry]:
    """Return every rank's entry, by rank; raises ``ValueError`` for a file that is not an entry."""
    return sorted((_read_entry(path) for path in _files(run_dir / "ranks")), key=lambda entry: entry.rank)


def read_roster_entries(run_dir: Path) -> Iterator[RankEntry | ValueError]:
    """Yield the entries in any order; for a file that is not an entry, the error."""
    return map(_entry_or_error, _files(run_dir / "ranks"))


def _entry_or_error(path: Path) -> RankEntry | ValueError:
    try:
        return _read_entry(path)
    except ValueError as error:
        return error


def _read_entry(path: Path) -> RankEntry:
    try:
        fields = json.loads(path.read_text())
        entry = RankEntry(**{**fields, "address": tuple(fields.get("address", ()))})
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a rank's entry: {error}") from error
    if not all(
        isinstance(each, int) for each in (entry.rank, entry.pid, entry.size, entry.started, *entry.address)
    ):
        raise ValueError(f"{path} is not a rank's entry: rank {entry.rank!r:.40}, pid {entry.pid!r:.40}")
    texts = (entry.host, entry.record, entry.hostname, entry.device, entry.interface)
    if not all(isinstance(each, str) and "\0" not in each for each in texts):
        raise ValueError(f"{path} is not a rank's entry: it names {entry.record!r:.80}")
    return entry


How = Literal["finished", "interrupted", "failed", "killed"]
"""``interrupted``: by SIGINT, SIGTERM or SIGHUP. ``failed``: by an exception or a non-zero exit status.
``killed``: by any other signal, or in an unknown way."""


@dataclass(frozen=True, slots=True)
class End:
    """How one rank's session ended."""

    rank: int
    how: How
    step: int
    """Training steps that it had finished."""
    record: str
    """The record of that session, as in the rank's entry: the end of another session is out of date."""
    why: str = ""
    """The exception, if there was one."""

    def write(self, run_dir: Path) -> None:
        """Raises ``OSError`` if it cannot be written."""
        _write(run_dir / "ends", self.rank, asdict(self))

    def is_written(self, run_dir: Path) -> bool:
        """Return whether an end of the same session is written."""
        end = read_end(run_dir, self.rank)
        return end is not None and end.record == self.record


def read_end(run_dir: Path, rank: int) -> End | None:
    """Return a rank's end; None if there is none that can be read."""
    return _read_end(_path(run_dir / "ends", rank))


def read_ends(run_dir: Path) -> dict[int, End]:
    """Return the ends by rank; files that are not an end are left out."""
    found = map(_read_end, _files(run_dir / "ends"))
    return {each.rank: each for each in found if each is not None}


def _read_end(path: Path) -> End | None:
    try:
        end = End(**json.loads(path.read_text()))
    except (OSError, TypeError, ValueError, RecursionError):
        return None
    is_valid = type(end.rank) is int and type(end.step) is int and end.how in get_args(How)
    return end if is_valid and isinstance(end.why, str) else None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _write(folder: Path, rank: int, document: dict[str, Any]) -> None:
    make_folders(folder)
    replace_text(_path(folder, rank), json.dumps(document) + "\n")


def _files(folder: Path) -> list[Path]:
    # Not ``glob``, which hides a folder that may not be read.
    return [path for path in folder.iterdir() if path.match("rank-*.json")] if folder.is_dir() else []
