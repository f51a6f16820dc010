"""Who runs where: one small file per rank in the run directory, for whoever looks at a running job."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from torchscout.decision.progress import Process
from torchscout.evidence.observer.liveness import Identity
from torchscout.private_files import make_folders, replace_text

__all__ = ["Entry", "read_roster"]

_SESSION = "session-"


@dataclass(frozen=True, slots=True)
class Entry:
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
    def own(cls, rank: int, record: Path | None, size: int = 0) -> Entry:
        """Of this process; without an observer there is no ``record``."""
        name = f"{_SESSION}{secrets.token_hex(16)}" if record is None else str(record)
        return cls(rank, socket.gethostname(), os.getpid(), name, size, Identity.own().started)

    @property
    def has_no_observer(self) -> bool:
        return self.record.startswith(_SESSION)

    def process(self) -> Process:
        """What the operating system says of its process; only on the same host."""
        return Identity(self.pid, self.started, Identity.own().boot).process()

    def write(self, run_dir: Path) -> None:
        path = run_dir / "ranks" / f"rank-{self.rank}.json"
        make_folders(path.parent)
        replace_text(path, json.dumps(asdict(self)) + "\n")


def read_roster(run_dir: Path) -> list[Entry]:
    """Every rank's entry, by rank; a ``ValueError`` names a file that is none."""
    folder = run_dir / "ranks"
    paths = folder.iterdir() if folder.is_dir() else ()  # unlike ``glob``, it says what may not be read
    found = [_entry(path) for path in paths if path.match("rank-*.json")]
    return sorted(found, key=lambda entry: entry.rank)


def _entry(path: Path) -> Entry:
    try:
        entry = Entry(**json.loads(path.read_text()))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a rank's entry: {error}") from error
    if not all(isinstance(each, int) for each in (entry.rank, entry.pid, entry.size, entry.started)):
        raise ValueError(f"{path} is not a rank's entry: rank {entry.rank!r:.40}, pid {entry.pid!r:.40}")
    if not all(isinstance(each, str) and "\0" not in each for each in (entry.host, entry.record)):
        raise ValueError(f"{path} is not a rank's entry: it names {entry.record!r:.80}")
    return entry
