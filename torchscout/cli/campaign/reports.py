"""Reads what a job writes down as it goes on: each line once."""

from __future__ import annotations

import json
from pathlib import Path

from torchscout.decision.record import Incident
from torchscout.decision.recorder import Stamped, stamped

__all__ = ["Reports", "Tail"]


class Tail:
    """One file of a run directory, from where one has stopped reading."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> list[Stamped]:
        """Whole lines that have come since; what cannot be read is a ``ValueError``."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            *lines, _ = file.read().split(b"\n")
        self._read += sum(len(line) + 1 for line in lines)
        return [stamped(json.loads(line)) for line in lines if line]


class Reports:
    """The incidents of a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir / "incidents.jsonl")

    def new(self) -> list[Stamped]:
        return [each for each in self._tail.new() if isinstance(each.item, Incident)]
