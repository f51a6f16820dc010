"""Where records go: JSON lines in the run directory, the log, a callback.

A recorder writes what it is given. Peers conclude alike, so who reports an incident is decided
before (``Incident.reporter``), and errors are left to the caller, which must not let them reach training.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchscout.decision.record import SCHEMA, EvidenceRecord, Incident, Resolved, from_json

__all__ = [
    "CallbackRecorder",
    "JsonlRecorder",
    "LogRecorder",
    "Problem",
    "Recorder",
    "Stamped",
    "Tee",
    "read",
    "stamped",
]

Recordable = EvidenceRecord | Incident | Resolved


class Recorder(Protocol):
    def record(self, item: Recordable) -> None:
        """Called once for every comparison, every incident and every end of one, in order."""
        ...

    def close(self) -> None:
        """Called once, last."""
        ...


class JsonlRecorder:
    """The run directory: ``incidents.jsonl`` for the job, ``records/rank-N.jsonl`` for each rank."""

    def __init__(self, run_dir: Path | str, rank: int) -> None:
        self._paths = {
            "incident": Path(run_dir) / "incidents.jsonl",
            "resolved": Path(run_dir) / "incidents.jsonl",
            "evidence": Path(run_dir) / "records" / f"rank-{rank}.jsonl",
        }
        self._files: dict[str, int] = {}

    def record(self, item: Recordable) -> None:
        line = {"schema": SCHEMA, "time": time.time(), "monotonic": time.monotonic(), **item.to_json()}
        # One write to an append-only file: several ranks add incidents, and a reader sees whole lines.
        os.write(self._file(line["kind"]), (json.dumps(line, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _file(self, kind: str) -> int:
        if kind not in self._files:
            path = self._paths[kind]
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._files[kind] = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":  # cut short by a crash
                os.write(file, b"\n")  # or that line would swallow ours
        return self._files[kind]


class LogRecorder:
    """Incidents as errors, disagreement as warnings, what was not checked as information."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("torchscout")

    def record(self, item: Recordable) -> None:
        if isinstance(item, Incident):
            self._logger.error("step %d: %s", item.step, item.sentence)
        elif isinstance(item, Resolved):
            self._logger.info("resolved after %.1f s: %s", item.stalled_seconds, item.sentence)
        elif item.verdict is None:
            self._logger.info("step %d: %s not checked: %s", item.step, item.surface, item.reason)
        elif not item.verdict.agrees:
            named = f"ranks {list(item.ranks)} differ" if item.ranks else f"ranks {list(item.peers)} disagree"
            self._logger.warning("step %d: %s %s: %s", item.step, item.surface, item.status, named)

    def close(self) -> None:
        """Nothing is held."""


class CallbackRecorder:
    """Incidents to the user's own function."""

    def __init__(self, callback: Callable[[Incident], None]) -> None:
        self._callback = callback

    def record(self, item: Recordable) -> None:
        if isinstance(item, Incident):
            self._callback(item)

    def close(self) -> None:
        """Nothing is held."""


class Tee:
    """Several recorders as one."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = tuple(recorders)

    def record(self, item: Recordable) -> None:
        for recorder in self._recorders:
            recorder.record(item)

    def close(self) -> None:
        for recorder in self._recorders:
            recorder.close()


@dataclass(frozen=True, slots=True)
class Stamped:
    """A line read back."""

    item: Recordable
    time: float
    """Wall clock, seconds since the epoch."""
    monotonic: float
    """The writing machine's monotonic clock; only differences within one boot mean anything."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that could not be read, and was skipped."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def read(path: Path | str) -> Iterator[Stamped | Problem]:
    """Every line of a JSONL file in order; a truncated or foreign one becomes a ``Problem``."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield stamped(json.loads(line))
            except ValueError as error:  # JSON and UTF-8 errors are ValueErrors too
                yield Problem(Path(path), number, str(error))


def stamped(line: Any) -> Stamped:
    """One line, as JSON has it; a ``ValueError`` says what is foreign about it."""
    if not isinstance(line, dict):
        raise ValueError(f"not a record: {line!r:.80}")
    if line.get("schema") != SCHEMA:
        raise ValueError(f"schema {line.get('schema')!r}, this version reads {SCHEMA}")
    try:
        return Stamped(from_json(line), float(line["time"]), float(line["monotonic"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a whole {line.get('kind')} line: {error!r}") from error
