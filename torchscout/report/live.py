"""Follows a run directory: the report's document as it is now, and what has changed since it was last asked.

It reads only, and only when it is asked. Incidents are read again as soon as their file has grown. Entries of
ranks and their records, which take long to read in a large job, are read in the background.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchscout.report.comparisons import Comparisons
from torchscout.report.document import document_of, summary
from torchscout.report.standing import job_state, overview
from torchscout.run.folder import HISTORY_FILE, INCIDENTS_FOLDER, RANKS_FOLDER, RECORDS_FOLDER, End, Unwatched
from torchscout.run.reader import Run

__all__ = ["LiveRun"]

_REST = 4.0
"""Reading in the background takes at most one part in this many, plus one, of the time."""
_SETTLING_SECONDS = 2.0
"""How long a file is read again after it has changed: a change at the same clock tick is not visible."""


class LiveRun:
    """Several threads may ask at the same time."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._ranks = _Part(run_dir, Run.read_ranks, RANKS_FOLDER, End.folder, Unwatched.folder)
        self._events = _Part(run_dir, Run.read_events, INCIDENTS_FOLDER, HISTORY_FILE, in_background=False)
        self._records = _Part(run_dir, Comparisons.read, RECORDS_FOLDER)
        self._lock = threading.Lock()
        self._read: list[tuple[Run, Any]] = []
        self._run = Run(run_dir)
        self._document: dict[str, Any] = {}
        self._changed: dict[str, int] = {}
        """The version in which each part of the document changed last."""
        self._version, self._epoch = 0, secrets.token_hex(4)

    def document(self) -> dict[str, Any]:
        """Return the document as it is now."""
        with self._lock:
            self._refresh()
            return dict(self._document)

    def changes(self, after: str = "") -> dict[str, Any]:
        """Return the parts of the document that have changed after a version of an earlier answer."""
        epoch, _, number = after.partition("-")
        with self._lock:
            self._refresh()
            known = int(number) if epoch == self._epoch and number.isdecimal() and len(number) < 16 else 0
            parts = {name: self._document[name] for name, at in self._changed.items() if at > known}
            return {"version": f"{self._epoch}-{self._version}", "parts": parts}

    def _refresh(self) -> None:
        read = [each.read() for each in (self._ranks, self._events, self._records)]
        document = self._document
        # By identity: what was not read again is the same object.
        is_new = [*map(id, read)] != [*map(id, self._read)]
        if is_new:
            self._read, self._run = read, _joined(*(run for run, _ in read))
        job = job_state(self._run)
        if is_new:
            document = document_of(self._run, read[-1][1], job)
        sentence = summary(self._run, document["incidents"], document["ranks"]["size"], job)
        document = {**document, "sentence": sentence, "now": overview(job)}
        if changed := [name for name, part in document.items() if self._document.get(name) != part]:
            self._version += 1
            self._changed |= dict.fromkeys(changed, self._version)
        self._document = document


def _joined(ranks: Run, events: Run, records: Run) -> Run:
    run = replace(events, entries=ranks.entries, ends=ranks.ends, unwatched=ranks.unwatched)
    run.problems, run.unlisted = [], 0
    for part in (ranks, events, records):
        for problem in part.problems:
            run.note(problem)
        run.unlisted += part.unlisted
        run.unread = run.unread or part.unread
    return run


class _Part:
    """Some files of a run, and what was read of them last."""

    def __init__(
        self, run_dir: Path, read: Callable[[Run], Any], *names: str, in_background: bool = True
    ) -> None:
        """``read`` reads the files and folders of these names."""
        self._run_dir, self._parse, self._names = run_dir, read, names
        self._in_background = in_background
        self._last: tuple[Run, Any] | None = None
        self._seen: object = None
        self._settled_at = self._next = 0.0
        self._thread: threading.Thread | None = None

    def read(self) -> tuple[Run, Any]:
        """Return what was read last, after reading again if the files have changed."""
        if self._last is None or not self._in_background:
            return self._refresh()
        is_reading = self._thread is not None and self._thread.is_alive()
        if not is_reading and time.monotonic() >= self._next:
            self._thread = threading.Thread(target=self._refresh, daemon=True)
            self._thread.start()
        return self._last

    def _refresh(self) -> tuple[Run, Any]:
        began, last = time.monotonic(), self._last
        seen = [_state(self._run_dir / name) for name in self._names]
        if seen != self._seen:
            self._settled_at = began + _SETTLING_SECONDS
        if last is None or seen != self._seen or began < self._settled_at:
            run = Run(self._run_dir)
            last = run, self._parse(run)
        self._last, self._seen = last, seen
        self._next = time.monotonic() + _REST * (time.monotonic() - began)
        return last


def _state(path: Path) -> object:
    """The name, size and times of a file; of a folder, those of its files."""
    try:
        if path.is_dir():
            return sorted(str(_state(each)) for each in path.iterdir())
        status = path.stat()
    except OSError as error:
        return str(error)
    return path.name, status.st_ino, status.st_size, status.st_mtime_ns
