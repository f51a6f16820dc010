"""Describes the process that holds a checkpoint folder (paper, section 9)."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torchscout.utils import procfs

__all__ = ["Owner", "refusal"]


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that holds a folder; if all processes of a run hold it, the first of them."""

    job: str
    host: str
    pid: int
    started: int | None
    """When the process began, in clock ticks since boot; it distinguishes processes with the same ``pid``."""
    since: str
    """Wall-clock time."""
    run: str
    """Distinguishes runs of one job: a digest, because the run's identifier may be secret."""

    def __str__(self) -> str:
        return f"job {self.job!r}, pid {self.pid} on {self.host}, since {self.since}"

    @classmethod
    def own(cls, job: str, run: str) -> Owner:
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        digest = hashlib.sha256(f"torchscout lock {run}".encode()).hexdigest()
        stat = procfs.process_stat(os.getpid())
        started = None if stat is None else stat.started
        return cls(job, socket.gethostname(), os.getpid(), started, since, digest)

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """True only if it is certain: the process was on this machine and has ended."""
        if not self.is_here or self.started is None:
            return False
        try:
            stat = procfs.process_stat(self.pid)
        except OSError:  # for example, no file descriptor is left to look with
            return False
        return stat is None or stat.has_ended or stat.started != self.started

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Owner | None:
        """The owner, or None if the bytes are incomplete."""
        try:
            document: Any = json.loads(data)
            found = cls(**{field.name: document[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        texts, numbers = (found.job, found.host, found.since, found.run), (found.pid, found.started or 0)
        is_whole = all(isinstance(each, str) for each in texts) and all(type(each) is int for each in numbers)
        return found if is_whole else None


def refusal(folder: Path, holder: Owner | None, how_known: str = "") -> str:
    who = "an unidentified process" if holder is None else str(holder)
    return f"{folder} is in use by {who}{how_known}; wait for it, end it, or use another folder"
