"""Who runs where: one small file per rank in the run directory, for whoever looks at a running job."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Entry", "read_roster"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one rank can be looked at."""

    rank: int
    host: str
    pid: int
    record: str
    """Its progress record, on that host; it is gone once the rank has finished."""

    @classmethod
    def own(cls, rank: int, record: Path) -> Entry:
        return cls(rank, socket.gethostname(), os.getpid(), str(record))

    def write(self, run_dir: Path) -> None:
        path = run_dir / "ranks" / f"rank-{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)) + "\n")


def read_roster(run_dir: Path) -> list[Entry]:
    """Every rank's entry, by rank; a ``ValueError`` names a file that is none."""
    paths = (run_dir / "ranks").glob("rank-*.json")
    return sorted((_entry(path) for path in paths), key=lambda entry: entry.rank)


def _entry(path: Path) -> Entry:
    try:
        return Entry(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a rank's entry: {error}") from error
