"""Tells a trainer's own code of incidents, as long as it can still run (paper, section 7)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from torchscout.decision import recorder
from torchscout.decision.record import Incident
from torchscout.decision.recorder import Stamped

__all__ = ["News"]

_POLL_SECONDS = 0.5


class News:
    """A thread that hands every new incident of the run directory to the user's function.

    Incidents are written by whichever observer found them, so where machines do not share the run
    directory, only the ranks on the hub's machine are told.
    """

    def __init__(
        self, run_dir: Path, callback: Callable[[Incident], None], failed: Callable[[Exception], None]
    ) -> None:
        self._log = recorder.Follower(run_dir / "incidents.jsonl")
        self._callback, self._failed = callback, failed
        for _ in self._log.fresh():
            continue  # an earlier life of the job is no news
        self._looking = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchscout-news", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, once what is on record by now has been told."""
        self._closing.set()
        self._thread.join(timeout=2 * _POLL_SECONDS)

    def look(self) -> None:
        """Tell what is new now."""
        with self._looking:
            try:
                for line in self._log.fresh():
                    if isinstance(line, Stamped) and isinstance(line.item, Incident):
                        self._callback(line.item)
            except Exception as error:  # noqa: BLE001  the user's function may raise anything
                self._failed(error)

    def _run(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            self.look()
        self.look()
        self._log.close()
