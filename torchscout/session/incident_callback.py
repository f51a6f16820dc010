"""Passes incidents to a trainer's log and to the user's callback while it runs (paper, section 7)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torchscout.decision.records.recorder import Follower, log_incident
from torchscout.decision.types import EvidenceRecord, Incident, Resolved
from torchscout.log import log

__all__ = ["IncidentCallback"]

_POLL_SECONDS = 0.5


class IncidentCallback:
    """Handles every incident of the job once on every rank: one rank logs it, each rank calls the callback.

    Ranks exchange the incidents that checks find (``add``). Those that observers find, the hub sends to all
    observers; each appends them to a file in memory, ``path``, which a thread of the trainer follows. Neither
    needs the run directory.
    """

    def __init__(
        self,
        rank: int,
        callbacks: Sequence[Callable[[Incident], None]],
        failed: Callable[[Exception], None],
        path: Path | None = None,
        copy: Callable[[int, Incident], None] = lambda *_: None,
    ) -> None:
        """``failed`` is called with what a callback raises; the next callback is still called. ``copy`` is
        called with an incident of ``add`` and the rank that has recorded it."""
        self.incidents: list[Incident] = []
        """The incidents of this session so far."""
        self._rank, self._callbacks, self._failed = rank, callbacks, failed
        self._copy = copy
        self._file = None if path is None else Follower(path)
        self._uncalled: queue.SimpleQueue[Incident] = queue.SimpleQueue()
        """Incidents that the callbacks have not been called with yet."""
        self._looking = threading.Lock()
        self._closing, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchscout-news", daemon=True)
        self._thread.start()

    def add(self, writer: int, incidents: Iterable[Incident]) -> None:
        """Take incidents that a check found on any rank; ``writer`` is the rank that has recorded them."""
        for incident in incidents:
            self._copy(writer, incident)
            self._take(incident)
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Wait until there is an incident, at most for this long."""
        deadline = time.monotonic() + seconds
        while not self.incidents and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
            self.look()

    def close(self) -> None:
        """Call the callbacks with all incidents that are known by now, and stop. Idempotent."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout=2 * _POLL_SECONDS)
        if not self._thread.is_alive():
            self._callbacks = ()  # they refer to parts that are closed as well

    def look(self) -> None:
        """Take what is new in the file, and call the callbacks."""
        with self._looking:
            try:
                for line in () if self._file is None else self._file.fresh():
                    self._take(line.item)
            except OSError as error:
                self._failed(error)
            while not self._uncalled.empty():
                incident = self._uncalled.get()
                for callback in self._callbacks:
                    self._call(callback, incident)

    def _call(self, callback: Callable[[Incident], None], incident: Incident) -> None:
        try:
            callback(incident)
        except Exception as error:  # noqa: BLE001  the user's function may raise anything
            self._failed(error)

    def _take(self, item: object) -> None:
        if isinstance(item, Incident):
            self.incidents.append(item)
            self._uncalled.put(item)
            if self._rank == item.logged_by:
                log_incident(item)
        elif isinstance(item, Resolved) and self._rank == 0:
            log_incident(item)
        elif isinstance(item, EvidenceRecord):  # known to this rank's observer only
            log.warning("step %d: %s: %s", item.step, item.surface, item.reason)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(_POLL_SECONDS)
            self._wake.clear()
            self.look()
        self.look()
        if self._file is not None:
            self._file.close()
