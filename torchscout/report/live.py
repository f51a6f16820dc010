"""Follows a run directory: the report's document as it is now, and what has changed since it was last asked.

It reads only, and only when it is asked. Incidents are read again as soon as their file has grown. Entries of
ranks and their records, which take long to read in a large job, are read in the background.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torchscout.report.comparisons import Comparisons
from torchscout.report.document import document_of
from torchscout.report.standing import job_state
from torchscout.run.folder import HISTORY_FILE, INCIDENTS_FOLDER, RECORDS_FOLDER
from torchscout.run.reader import Run, is_run

__all__ = ["LiveRun"]

_MOST_ROWS = 64
"""Ranks that are listed with their present state; the others are counted."""
_REST = 4.0
"""Reading in the background takes at most one part in this many, plus one, of the time."""
_SETTLING_SECONDS = 2.0
"""How long a file is read again after it has changed: a change at the same clock tick is not visible."""
_ORDER = ("killed", "failed", "stopped", "running", "paused", "interrupted")


class LiveRun:
    """Several threads may ask at the same time."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        folders = lambda: chain(*(_states(run_dir / name, ".json") for name in ("ranks", "ends")))  # noqa: E731
        lines = (".jsonl", ".1", ".2")
        records = lambda: _states(run_dir / RECORDS_FOLDER, *lines)  # noqa: E731
        events = lambda: chain(_states(run_dir / INCIDENTS_FOLDER, *lines), [_state(run_dir / HISTORY_FILE)])  # noqa: E731
        self._ranks = _Part(run_dir, _Read.ranks, folders)
        self._records = _Part(run_dir, _Read.comparisons, records)
        self._events = _Part(run_dir, _Read.events, events, in_background=False)
        self._lock = threading.Lock()
        self._parts: tuple[_Read, ...] = ()
        self._document: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
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
        parts = (self._ranks.read(), self._events.read(), self._records.read())
        # By identity: what was not read again is the same object.
        is_new = len(self._parts) != len(parts) or any(
            a is not b for a, b in zip(self._parts, parts, strict=True)
        )
        if is_new:
            self._parts = parts
            self._run, compared = _joined(*parts)
            self._document = document_of(self._run, compared)
        self._document["now"] = _now(self.run_dir, self._run, self._document["incidents"])
        # The document of a large job takes long to write; most often only this part has changed.
        texts = {name: json.dumps(self._document[name]) for name in (self._document if is_new else ["now"])}
        if changed := [name for name, text in texts.items() if self._texts.get(name) != text]:
            self._version += 1
            self._changed |= dict.fromkeys(changed, self._version)
            self._texts |= texts


@dataclass(slots=True)
class _Read:
    """What was read of some files."""

    run: Run
    records: Comparisons = field(default_factory=Comparisons)

    @classmethod
    def ranks(cls, run_dir: Path) -> _Read:
        run = Run(run_dir)
        run.read_ranks()
        return cls(run)

    @classmethod
    def events(cls, run_dir: Path) -> _Read:
        run = Run(run_dir)
        run.read_events()
        return cls(run)

    @classmethod
    def comparisons(cls, run_dir: Path) -> _Read:
        run = Run(run_dir)
        return cls(run, Comparisons.read(run))


def _joined(ranks: _Read, events: _Read, records: _Read) -> tuple[Run, Comparisons]:
    run = replace(events.run, entries=ranks.run.entries, ends=ranks.run.ends, problems=[], unlisted=0)
    for part in (ranks.run, events.run, records.run):
        for problem in part.problems:
            run.note(problem)
        run.unlisted += part.unlisted
    return run, records.records


class _Part:
    """Some files of a run, and what was read of them last."""

    def __init__(
        self,
        run_dir: Path,
        read: Callable[[Path], _Read],
        state: Callable[[], Iterator[object]],
        *,
        in_background: bool = True,
    ) -> None:
        """``state`` changes when a file does."""
        self._run_dir, self._read, self._state = run_dir, read, state
        self._in_background = in_background
        self._run: _Read | None = None
        self._seen: tuple[object, ...] = ()
        self._settled_at = self._next = 0.0
        self._thread: threading.Thread | None = None

    def read(self) -> _Read:
        """Return what was read last, after reading again if the files have changed."""
        if self._run is None or not self._in_background:
            return self._refresh()
        is_reading = self._thread is not None and self._thread.is_alive()
        if not is_reading and time.monotonic() >= self._next:
            self._thread = threading.Thread(target=self._refresh, daemon=True)
            self._thread.start()
        return self._run

    def _refresh(self) -> _Read:
        began = time.monotonic()
        seen = tuple(self._state())
        if seen != self._seen:
            self._settled_at = began + _SETTLING_SECONDS
        run = self._run
        if run is None or seen != self._seen or began < self._settled_at:
            run = self._read(self._run_dir)
        # What is damaged in the same way need not be sent again.
        self._run = run if self._run is None or run != self._run else self._run
        self._seen = seen
        self._next = time.monotonic() + _REST * (time.monotonic() - began)
        return self._run


def _states(folder: Path, *suffixes: str) -> Iterator[object]:
    """The names, sizes and times of the files of a folder."""
    try:
        yield from sorted(str(_state(each)) for each in folder.iterdir() if each.suffix in suffixes)
    except OSError as error:
        yield str(error)


def _state(path: Path) -> object:
    try:
        status = path.stat()
    except OSError as error:
        return str(error)
    return path.name, status.st_ino, status.st_size, status.st_mtime_ns


def _now(run_dir: Path, run: Run, incidents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of the job and of its ranks; those that need attention first."""
    if not run.entries:
        found = f"{run_dir} has no ranks yet" if is_run(run_dir) else f"{run_dir} is no run directory yet"
        return {
            "state": "unknown",
            "sentence": found,
            "counts": {},
            "ranks": [],
            "unlisted": 0,
            "checks": None,
        }
    state = job_state(run.entries, {end.rank: end for end in run.ends}, incidents)
    ranks, replay = state["ranks"], run.replay()
    # Of a rank elsewhere, or one that has just finished, there is nothing to say.
    known = [rank for rank in ranks if rank["state"] not in {"elsewhere", "finished"}]
    rows = [
        {
            **{name: rank.get(name) for name in ("rank", "host", "pid", "state", "step", "phase", "inside")},
            "silent_seconds": rank.get("silent_seconds"),
            "device": rank.get("device"),
        }
        for rank in sorted(known, key=_attention)[:_MOST_ROWS]
    ]
    return {
        "state": state["state"],
        "sentence": state["sentence"],
        "counts": dict(Counter(rank["state"].partition(":")[0] for rank in ranks)),
        "ranks": rows,
        "unlisted": len(known) - len(rows),
        "checks": None if replay is None else replay["sentence"],
    }


def _attention(rank: Mapping[str, Any]) -> tuple[int, float, int]:
    state = rank["state"]
    place = _ORDER.index(state) if state in _ORDER else -1
    return place, -(rank.get("silent_seconds") or 0.0), rank["rank"]
