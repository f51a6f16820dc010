"""Writes what checks have compared: findings at once, and counts of all other comparisons, of which a healthy
job makes many."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torchscout.config import StragglerConfig
from torchscout.decision.timings import PeerTimes
from torchscout.decision.types import Agreement, Agreements, EvidenceRecord, Manifestation, Recordable
from torchscout.run.writer import Recorder

__all__ = ["CHECKS", "SECONDS", "SummaryRecorder"]

CHECKS = 100
"""Counts are written after this many checks; at first sooner, so that a short job writes some."""
SECONDS = 600.0
"""Counts are written after this time."""
_MOST = 1000
"""At most this many counts are kept, besides those of one check."""


class SummaryRecorder:
    """Writes findings at once, and counts of all other comparisons from time to time.

    A process that is killed loses the counts since then.
    """

    def __init__(
        self, recorder: Recorder, config: StragglerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``config`` decides which differences of times are findings."""
        self._recorder, self._config, self._clock = recorder, config, clock
        self._counts: dict[tuple[Any, ...], tuple[tuple[int, ...], Agreement]] = {}
        """By what was compared among which peers; with the peers."""
        self._step: int | None = None
        self._checks, self._enough = 0, 1
        self._since = clock()

    def record(self, item: Recordable) -> None:
        if not isinstance(item, EvidenceRecord) or _has_finding(item, self._config):
            self._recorder.record(item)
            return
        complete = self._taken() if item.step != self._step and self._is_time() else []
        self._checks += item.step != self._step
        self._step = item.step
        what = {name: getattr(item, name) for name in ("surface", "manifestation", "layer", "mode")}
        key = (item.peers, *what.values())
        _, known = self._counts.get(key, (None, Agreement(**what, count=0, first=item.step, last=item.step)))
        self._counts[key] = item.peers, replace(known, count=known.count + 1, last=item.step)
        self._write(complete)  # last: it may fail

    def close(self) -> None:
        try:
            self._write(self._taken())
        finally:
            self._recorder.close()

    def _is_time(self) -> bool:
        """Called at the beginning of a check, so that lines contain whole checks."""
        is_late = self._clock() - self._since >= SECONDS
        return self._checks >= self._enough or is_late or len(self._counts) >= _MOST

    def _taken(self) -> list[Agreements]:
        by_peers: dict[tuple[int, ...], list[Agreement]] = {}
        for peers, each in self._counts.values():
            by_peers.setdefault(peers, []).append(each)
        self._counts, self._checks, self._since = {}, 0, self._clock()
        self._enough = min(2 * self._enough, CHECKS)
        return [Agreements(peers=peers, surfaces=tuple(each)) for peers, each in by_peers.items()]

    def _write(self, lines: list[Agreements]) -> None:
        with ExitStack() as writes:  # writes all lines, even if one fails
            for each in lines:
                writes.callback(self._recorder.record, each)


def _has_finding(record: EvidenceRecord, config: StragglerConfig) -> bool:
    """Whether peers disagreed, or nothing was compared; times must differ materially."""
    if record.verdict is None or record.verdict.agrees:
        return record.verdict is None
    if record.manifestation is not Manifestation.STRAGGLER:
        return True
    times = PeerTimes.of(record, config)
    return times is None or bool(times.slower())
