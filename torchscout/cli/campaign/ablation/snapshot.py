"""Where all ranks of a hanging job stand, read from outside, as `scout status` does."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from torchscout.decision.progress import RankStatus
from torchscout.errors import TornRecordError
from torchscout.observer.record.directory import read_roster
from torchscout.observer.record.reader import ProgressReader

__all__ = ["standings"]


def standings(run_dir: Path) -> list[RankStatus]:
    """Of every rank whose record is there."""
    found = []
    for entry in read_roster(run_dir):
        with suppress(FileNotFoundError, TornRecordError):
            reader = ProgressReader(Path(entry.record))
            found.append(RankStatus(entry.rank, reader.trainer(), reader.read()))
    return found
