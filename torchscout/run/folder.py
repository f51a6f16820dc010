"""A run directory: what is where, and each rank's entry and end.

incidents/rank-N.jsonl      incidents, their ends and decisions, by the trainer of rank N
incidents/observer-N.jsonl  the same, by its observer
records/                    comparisons, likewise; see ``run.writer``
history.jsonl               starts of the job, and which checkpoints could be trusted when, by rank 0
replay.json                 whether checks are on or off, by rank 0. Written once they have failed
heartbeat.json              replaced every 30 s by the observer of rank 0, as long as its trainer lives
ranks/rank-N.json           where rank N runs
ends/rank-N.json            how its session ended. A session that is closed writes its own end; for a trainer
                            that ended in any other way, its observer does
observers/rank-N.log        errors of its observer
unwatched/rank-N.json       its entry once more, written when its observer has ended for good

Each file has one writer. Machines that do not share a disk have a folder each, with what all ranks found, and
a heartbeat of their own.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from torchscout.decision.types import Incident, parsed
from torchscout.utils import procfs
from torchscout.utils.identity import host_name, launcher_job
from torchscout.utils.private_files import make_folders, replace_text

__all__ = [
    "HEARTBEAT_SECONDS",
    "HISTORY_FILE",
    "INCIDENTS_FOLDER",
    "RANKS_FOLDER",
    "RECORDS_FOLDER",
    "REPLAY_FILE",
    "RUNS_FILE",
    "End",
    "Heartbeat",
    "How",
    "Identity",
    "RankEntry",
    "Unwatched",
    "are_possible",
    "read_all",
    "read_departed",
    "read_end",
    "read_heartbeat",
    "read_unwatched",
]

RANKS_FOLDER, INCIDENTS_FOLDER, RECORDS_FOLDER = "ranks", "incidents", "records"
HISTORY_FILE, REPLAY_FILE = "history.jsonl", "replay.json"
RUNS_FILE = "runs.jsonl"
"""In the folder of the checkpoints: the run directories of the runs that have used it."""
HEARTBEAT_SECONDS = 30.0
_MOST_INTERVALS = 3
"""A heartbeat that is as many intervals old says nothing any more."""
_HEARTBEAT = "heartbeat.json"
_SESSION = "session-"
_MOST_RANKS = 1 << 20
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Identity:
    """Which run of which job this is, on all ranks alike."""

    run_dir: str
    """Absolute."""
    start: str = ""
    """Identifies this start of the job, since several may use one folder."""
    job: str = ""
    """The name of the job, if it has one."""
    launcher: str = ""
    """See ``identity.launcher_job``; rank 0's."""

    def stamped(self, incident: Incident, occurrence: str = "") -> Incident:
        """Return the incident as one of this run. What all ranks conclude alike, they stamp alike; what one
        process has found needs an ``occurrence`` of its own."""
        return replace(incident, launcher=self.launcher, occurrence=f"{self.start}{occurrence}")

    @property
    def command(self) -> str:
        """Shows more."""
        return f"scout status {self.run_dir}"

    @property
    def reference(self) -> str:
        """What follows a line of the log: ``job llama, Slurm job 4711; more: scout status ...``."""
        job = ", ".join(filter(None, (self.job and f"job {self.job}", self.launcher)))
        return "; ".join(filter(None, (job, f"more: {self.command}")))

    @property
    def fields(self) -> dict[str, str]:
        """What a message to another program has."""
        return {"job": self.job, "launcher": self.launcher, "run_dir": self.run_dir, "command": self.command}


@dataclass(frozen=True, slots=True)
class RankEntry:
    """Where one rank runs."""

    folder: ClassVar[str] = RANKS_FOLDER
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
    launcher: str = ""
    """See ``identity.launcher_job``."""

    def __post_init__(self) -> None:
        if not are_possible(self.rank, self.size, *self.address):
            raise ValueError(f"no job has rank {self.rank} of {self.size} at {self.address}")

    @classmethod
    def own(cls, rank: int, record: Path | None, size: int = 0) -> RankEntry:
        """Return the entry of this process; ``record`` is None without an observer."""
        name = f"{_SESSION}{secrets.token_hex(16)}" if record is None else str(record)
        stat = procfs.process_stat(os.getpid())
        return cls(
            *(rank, host_name(), os.getpid(), name, size),
            started=0 if stat is None else stat.started,
            hostname=socket.gethostname(),
            launcher=launcher_job(),
        )

    @property
    def is_here(self) -> bool:
        """Whether the rank runs on this machine."""
        return (self.hostname or self.host) == socket.gethostname()

    @property
    def has_no_observer(self) -> bool:
        return self.record.startswith(_SESSION)

    def write(self, run_dir: Path) -> None:
        _write_rank(self, run_dir)


def are_possible(*ranks: int) -> bool:
    """Return whether a job may have these ranks: what is shown grows with the largest one."""
    return all(0 <= rank < _MOST_RANKS for rank in ranks)


How = Literal["finished", "interrupted", "failed", "killed"]
"""``interrupted``: by SIGINT, SIGTERM or SIGHUP. ``failed``: by an exception or a non-zero exit status.
``killed``: by any other signal, or in an unknown way."""


@dataclass(frozen=True, slots=True)
class End:
    """How one rank's session ended."""

    folder: ClassVar[str] = "ends"
    rank: int
    how: How
    step: int
    """Training steps that it had finished."""
    record: str
    """The record of that session, as in the rank's entry: the end of another session is out of date."""
    why: str = ""
    """The exception, signal or exit status, as far as it is known."""

    def write(self, run_dir: Path) -> None:
        """Raises ``OSError`` if it cannot be written."""
        _write_rank(self, run_dir)


@dataclass(frozen=True, slots=True)
class Unwatched:
    """A rank whose observer has ended too often: it is not watched for hangs any more."""

    folder: ClassVar[str] = "unwatched"
    rank: int
    record: str
    """Of its session, as in the rank's entry. The entry itself stays as it is: when ``ranks`` changed last
    says when the session began."""

    def write(self, run_dir: Path) -> None:
        """Raises ``OSError`` if it cannot be written."""
        _write_rank(self, run_dir)


OfRank = TypeVar("OfRank", RankEntry, End, Unwatched)
OfSession = TypeVar("OfSession", End, Unwatched)


def read_all(kind: type[OfRank], run_dir: Path, note: Callable[[ValueError], object]) -> list[OfRank]:
    """Return the entries or ends of all ranks, by rank. A file that is none is left out, and ``note`` called.
    Raises ``OSError`` for a folder that cannot be read."""
    folder, found = run_dir / kind.folder, list[OfRank]()
    # Not ``glob``, which hides a folder that may not be read.
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.match("rank-*.json"):
            try:
                found.append(_read(kind, path))
            except ValueError as error:
                note(error)
    return sorted(found, key=lambda each: each.rank)


def read_unwatched(run_dir: Path) -> list[int]:
    """Return the ranks that are not watched any more in their present session; raises ``OSError``."""
    return [each.rank for each in _of_present_sessions(Unwatched, run_dir)]


def read_departed(run_dir: Path) -> list[int]:
    """Return the ranks whose present sessions have finished, or were asked to end; raises ``OSError``."""
    ends = _of_present_sessions(End, run_dir)
    return [each.rank for each in ends if each.how in ("finished", "interrupted")]


def read_end(run_dir: Path, rank: int, record: str) -> End | None:
    """Return the end of this session of a rank; None if there is none that can be read."""
    with suppress(ValueError):
        end = _read(End, _path(End, run_dir, rank))
        return end if end.record == record else None
    return None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says that a trainer lives: a power loss or SIGKILL of everything leaves no end behind."""

    rank: int
    record: str
    """The record of its session, as in the rank's entry: the heartbeat of another session is out of date."""
    step: int
    interval: float
    """Seconds until the next one."""
    time: float = 0.0
    """When it was written: the time of the file."""

    @property
    def is_fresh(self) -> bool:
        """Whether the next one is not overdue. The time of the file is compared with the clock of this
        machine: where they differ very much, a heartbeat is not fresh."""
        return abs(time.time() - self.time) < _MOST_INTERVALS * self.interval

    def write(self, run_dir: Path) -> None:
        """Raises ``OSError`` if it cannot be written, also if somebody has removed the folder."""
        document = asdict(self)
        del document["time"]
        replace_text(run_dir / _HEARTBEAT, json.dumps(document) + "\n")


def read_heartbeat(run_dir: Path) -> Heartbeat | None:
    """Return the last heartbeat; None if none can be read."""
    path = run_dir / _HEARTBEAT
    with suppress(OSError, ValueError):
        return replace(_read(Heartbeat, path), time=path.stat().st_mtime)
    return None


def _of_present_sessions(kind: type[OfSession], run_dir: Path) -> Iterator[OfSession]:
    for each in read_all(kind, run_dir, lambda _: None):
        with suppress(ValueError):
            if _read(RankEntry, _path(RankEntry, run_dir, each.rank)).record == each.record:
                yield each


def _path(kind: type[RankEntry | End | Unwatched], run_dir: Path, rank: int) -> Path:
    return run_dir / kind.folder / f"rank-{rank}.json"


def _write_rank(item: RankEntry | End | Unwatched, run_dir: Path) -> None:
    path = _path(type(item), run_dir, item.rank)
    make_folders(path.parent)
    replace_text(path, json.dumps(asdict(item)) + "\n")


def _read(kind: type[Item], path: Path) -> Item:
    try:
        found: Item = parsed(kind, json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found
