"""Tells a trainer's log and its own code of incidents, as long as it can still run (paper, section 7)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from torchscout.decision.record import EvidenceRecord, Incident, Resolved
from torchscout.decision.recorder import Follower, log_incident
from torchscout.log import log

__all__ = ["IncidentCallback"]

_POLL_SECONDS = 0.5


class IncidentCallback:
    """Every incident of the job, once on every rank: one rank logs it, each calls the user's function.

    What checks find, ranks tell each other (``add``). What observers find, the hub sends to all of them, and
    each appends it to a file in memory, ``path``, which a thread of its trainer follows. Neither needs a run
    directory.
    """

    def __init__(
        self,
        rank: int,
        callback: Callable[[Incident], None] | None,
        failed: Callable[[Exception], None],
        path: Path | None = None,
    ) -> None:
        self.incidents: list[Incident] = []
        """Those of this session so far."""
        self._rank, self._callback, self._failed = rank, callback, failed
        self._file = None if path is None else Follower(path)
        self._waiting: queue.SimpleQueue[Incident] = queue.SimpleQueue()
        """What the user's function is to be called with."""
        self._looking = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchscout-news", daemon=True)
        self._thread.start()

    def add(self, incidents: Iterable[Incident]) -> None:
        """What a check has found, on whichever rank."""
        for incident in incidents:
            self._take(incident)

    def wait(self, seconds: float) -> None:
        """Until there is an incident, or for so long."""
        deadline = time.monotonic() + seconds
        while not self.incidents and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
            self.look()

    def close(self) -> None:
        """Stop, once the user's function was called with everything that is known by now."""
        self._closing.set()
        self._thread.join(timeout=2 * _POLL_SECONDS)

    def look(self) -> None:
        """Take what is new now."""
        with self._looking:
            try:
                for line in () if self._file is None else self._file.fresh():
                    self._take(line.item)
            except OSError as error:
                self._failed(error)
            while not self._waiting.empty():
                self._call(self._waiting.get())

    def _take(self, item: object) -> None:
        if isinstance(item, Incident):
            self.incidents.append(item)
            self._waiting.put(item)
            if self._rank == _logger_of(item):
                log_incident(item)
        elif isinstance(item, Resolved) and self._rank == 0:
            log_incident(item)
        elif isinstance(item, EvidenceRecord):  # what only this rank's observer knows
            log.warning("step %d: %s: %s", item.step, item.surface, item.reason)

    def _call(self, incident: Incident) -> None:
        if self._callback is not None:
            try:
                self._callback(incident)
            except Exception as error:  # noqa: BLE001  the user's function may raise anything
                self._failed(error)

    def _run(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            self.look()
        self.look()
        if self._file is not None:
            self._file.close()


def _logger_of(incident: Incident) -> int:
    """The rank whose log has it: the first one, unless it is named itself and may not be able to run."""
    return 0 if 0 not in incident.ranks else incident.reporter
