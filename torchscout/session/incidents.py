"""Incidents in a trainer: written, logged, posted, and passed to the user's function while it runs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from torchscout.communicators import Job
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation, Recordable, Resolved
from torchscout.log import log
from torchscout.run.notify import Poster, Webhook, line_about
from torchscout.run.reader import Follower
from torchscout.run.writer import record_one

__all__ = ["Incidents"]

_POLL_SECONDS = 0.5


class Incidents:
    """Handles every incident of the job once on every rank: one rank writes it, one logs and posts it, each
    calls the user's function.

    Ranks exchange the incidents that checks find (``publish``). Those that observers find, the hub writes,
    posts and sends to all observers; each appends them to a file in memory, ``news``, which a thread of the
    trainer follows. What ends trainers, an observer also shows in the job's output, since it survives them.
    """

    def __init__(
        self,
        job: Job,
        callbacks: Sequence[Callable[[Incident], None]],
        failed: Callable[[Exception], None],
        news: Path | None = None,
        webhook: Webhook | None = None,
    ) -> None:
        """``failed`` is called with what a callback or the run directory raises; the next callback is still
        called."""
        self.known: list[Incident] = []
        """The incidents of this session so far."""
        self._job, self._callbacks, self._failed = job, callbacks, failed
        self._poster = None if webhook is None else Poster(webhook, job.run)
        self._file = None if news is None else Follower(news)
        self._uncalled: queue.SimpleQueue[Incident] = queue.SimpleQueue()
        """Incidents that the callbacks have not been called with yet."""
        self._looking = threading.Lock()
        self._closing, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchscout-news", daemon=True)
        self._thread.start()

    def publish(self, reporter: int, incidents: Iterable[Incident], *, is_shared: bool = True) -> None:
        """Take incidents that a check found on rank ``reporter``. Every rank makes this call or, unless
        ``is_shared``, only that one."""
        job = self._job
        for each in incidents:
            incident = job.run.stamped(each)
            if job.rank == reporter or job.copies_from(reporter):
                self._attempt(partial(record_one, job.run_dir, job.rank, incident))
            self._keep(incident)
            if job.rank == (incident.logged_by if is_shared else reporter):
                log.error("%s", line_about(incident, job.run))
                if self._poster is not None:
                    self._poster.post(incident)
        self._wake.set()

    def resolved(self, item: Resolved) -> None:
        """Take the end of an incident of an earlier session. One rank makes this call."""
        log.info("%s", line_about(item, self._job.run))
        if self._poster is not None:
            self._poster.post(item)

    def wait(self, seconds: float) -> None:
        """Wait until there is an incident, at most for this long."""
        deadline = time.monotonic() + seconds
        while not self.known and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
            self.look()

    def close(self) -> None:
        """Call the callbacks with all incidents that are known by now, and stop. Idempotent."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout=2 * _POLL_SECONDS)
        if not self._thread.is_alive():
            self._callbacks = ()  # they refer to parts that are closed as well
        if self._poster is not None:
            self._poster.close()

    def look(self) -> None:
        """Take what is new in the file, and call the callbacks."""
        with self._looking:
            self._attempt(self._read_news)
            while not self._uncalled.empty():
                incident = self._uncalled.get()
                for callback in self._callbacks:
                    self._attempt(partial(callback, incident))

    def _read_news(self) -> None:
        for line in () if self._file is None else self._file.fresh():
            self._take(line.item)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  the user's function may raise anything
            self._failed(error)

    def _take(self, item: Recordable) -> None:
        """Take what an observer has found."""
        rank = self._job.rank
        if isinstance(item, Incident):
            self._keep(item)
            if rank == item.logged_by and item.manifestation is not Manifestation.CRASH:
                log.error("%s", line_about(item, self._job.run))
        elif isinstance(item, Resolved) and rank == 0:
            log.info("%s", line_about(item, self._job.run))
        elif isinstance(item, EvidenceRecord):  # known to this rank's observer only
            log.warning("step %d: %s: %s", item.step, item.surface, item.reason)

    def _keep(self, incident: Incident) -> None:
        self.known.append(incident)
        self._uncalled.put(incident)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(_POLL_SECONDS)
            self._wake.clear()
            self.look()
        self.look()
        if self._file is not None:
            self._file.close()
