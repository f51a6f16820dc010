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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torchscout.decision.types import Incident, parsed
from torchscout.utils import procfs
from torchscout.utils.identity import host_name, launcher_job
from torchscout.utils.private_files import make_folders, replace_text

__all__ = [
    "HEARTBEAT_SECONDS",
    "HISTORY_FILE",
    "INCIDENTS_FOLDER",
    "RECORDS_FOLDER",
    "REPLAY_FILE",
    "RUNS_FILE",
    "End",
    "Heartbeat",
    "How",
    "Identity",
    "RankEntry",
    "read_end",
    "read_ends",
    "read_heartbeat",
    "read_roster",
    "read_roster_entries",
    "read_unwatched",
]

INCIDENTS_FOLDER, RECORDS_FOLDER = "incidents", "records"
HISTORY_FILE, REPLAY_FILE = "history.jsonl", "replay.json"
RUNS_FILE = "runs.jsonl"
"""In the folder of the checkpoints: the run directories of the runs that have used it."""
HEARTBEAT_SECONDS = 30.0
_HEARTBEAT = "heartbeat.json"
_RANKS, _ENDS, _UNWATCHED = "ranks", "ends", "unwatched"
_SESSION = "session-"


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
    def in_words(self) -> str:
        """``job llama, Slurm job 4711``; empty if nothing is known."""
        return ", ".join(filter(None, (self.job and f"job {self.job}", self.launcher)))

    @property
    def command(self) -> str:
        """Shows more."""
        return f"scout status {self.run_dir}"

    @property
    def reference(self) -> str:
        """What follows a line of the log: ``job llama, Slurm job 4711; more: scout status ...``."""
        return "; ".join(filter(None, (self.in_words, f"more: {self.command}")))

    @property
    def fields(self) -> dict[str, str]:
        """What a message to another program has."""
        return {"job": self.job, "launcher": self.launcher, "run_dir": self.run_dir, "command": self.command}


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
    launcher: str = ""
    """See ``identity.launcher_job``."""

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
        stat, hostname = procfs.process_stat(os.getpid()), socket.gethostname()
        started = 0 if stat is None else stat.started
        facts = host_name(), os.getpid(), name, size, started, address, hostname, device, interface
        return cls(rank, *facts, launcher_job())

    @property
    def is_here(self) -> bool:
        """Whether the rank runs on this machine."""
        return (self.hostname or self.host) == socket.gethostname()

    @property
    def has_no_observer(self) -> bool:
        return self.record.startswith(_SESSION)

    def write(self, run_dir: Path) -> None:
        _write(run_dir / _RANKS, self.rank, asdict(self))

    def write_unwatched(self, run_dir: Path) -> None:
        """Record that this rank is not watched for hangs any more. Not in the entry itself: when ``ranks``
        changed last says when the session began."""
        _write(run_dir / _UNWATCHED, self.rank, asdict(self))


def read_roster(run_dir: Path) -> list[RankEntry]:
    """Return every rank's entry, by rank; raises ``ValueError`` for a file that is not an entry."""
    return sorted((_read_entry(path) for path in _files(run_dir / _RANKS)), key=lambda entry: entry.rank)


def read_roster_entries(run_dir: Path) -> Iterator[RankEntry | ValueError]:
    """Yield the entries in any order; for a file that is not an entry, the error."""
    return map(_entry_or_error, _files(run_dir / _RANKS))


def _entry_or_error(path: Path) -> RankEntry | ValueError:
    try:
        return _read_entry(path)
    except ValueError as error:
        return error


def read_unwatched(run_dir: Path) -> list[int]:
    """Return the ranks whose observer has ended for good in their present session; raises ``OSError``."""
    lost = (
        each for each in map(_entry_or_error, _files(run_dir / _UNWATCHED)) if isinstance(each, RankEntry)
    )
    return sorted(each.rank for each in lost if each == _entry_or_error(_path(run_dir / _RANKS, each.rank)))


def _read_entry(path: Path) -> RankEntry:
    try:
        entry: RankEntry = parsed(RankEntry, json.loads(path.read_text()))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a rank's entry: {error}") from error
    if "\0" in entry.record:
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
    """The exception, signal or exit status, as far as it is known."""

    def write(self, run_dir: Path) -> None:
        """Raises ``OSError`` if it cannot be written."""
        _write(run_dir / _ENDS, self.rank, asdict(self))

    def is_written(self, run_dir: Path) -> bool:
        """Return whether an end of the same session is written."""
        end = read_end(run_dir, self.rank)
        return end is not None and end.record == self.record


def read_end(run_dir: Path, rank: int) -> End | None:
    """Return a rank's end; None if there is none that can be read."""
    return _read_end(_path(run_dir / _ENDS, rank))


def read_ends(run_dir: Path) -> dict[int, End]:
    """Return the ends by rank; files that are not an end are left out."""
    found = map(_read_end, _files(run_dir / _ENDS))
    return {each.rank: each for each in found if each is not None}


def _read_end(path: Path) -> End | None:
    try:
        end: End = parsed(End, json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError):
        return None
    return end


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says that a trainer lives: a power loss or SIGKILL of everything leaves no end behind."""

    rank: int
    record: str
    """The record of its session, as in the rank's entry: the heartbeat of another session is out of date."""
    step: int
    interval: float
    """Seconds until the next one."""

    def write(self, run_dir: Path) -> None:
        """Raises ``OSError`` if it cannot be written, also if somebody has removed the folder."""
        replace_text(run_dir / _HEARTBEAT, json.dumps(asdict(self)) + "\n")


def read_heartbeat(run_dir: Path) -> tuple[Heartbeat, float] | None:
    """Return the last heartbeat with the time at which it was written; None if none can be read."""
    try:
        with (run_dir / _HEARTBEAT).open() as file:
            return parsed(Heartbeat, json.load(file)), os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError, RecursionError):
        return None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _write(folder: Path, rank: int, document: dict[str, Any]) -> None:
    make_folders(folder)
    replace_text(_path(folder, rank), json.dumps(document) + "\n")


def _files(folder: Path) -> list[Path]:
    # Not ``glob``, which hides a folder that may not be read.
    return [path for path in folder.iterdir() if path.match("rank-*.json")] if folder.is_dir() else []
