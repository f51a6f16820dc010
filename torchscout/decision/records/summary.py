"""Counts comparisons without a finding instead of writing them: a healthy job makes many."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from torchscout.config import StragglerConfig
from torchscout.decision.records.recorder import Recorder
from torchscout.decision.straggler.persistence import Times
from torchscout.decision.types import (
    Agreement,
    Agreements,
    EvidenceRecord,
    Manifestation,
    Recordable,
    Surface,
)

__all__ = ["SummaryRecorder", "has_finding"]

_CHECKS = 100
"""Counts are written after this many checks; at first sooner, so that a short job writes some."""
_SECONDS = 600.0
"""Counts are written after this time."""
_MOST = 1000
"""At most this many counts are kept, besides those of one check."""

_Counts = dict[tuple[tuple[int, ...], Surface, Manifestation, str | None, str | None], Agreement]
"""By peers, surface, manifestation, layer and mode."""


class SummaryRecorder:
    """Writes findings at once, and counts of all other comparisons from time to time.

    A process that is killed loses the counts since then.
    """

    def __init__(
        self, recorder: Recorder, config: StragglerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``config`` decides which differences of times are findings."""
        self._recorder, self._config, self._clock = recorder, config, clock
        self._counts: _Counts = {}
        self._step: int | None = None
        self._checks, self._enough = 0, 1
        self._since = clock()

    def record(self, item: Recordable) -> None:
        if isinstance(item, EvidenceRecord) and not has_finding(item, self._config):
            self._count(item)
        else:
            self._recorder.record(item)

    def close(self) -> None:
        try:
            self._write(self._taken())
        finally:
            self._recorder.close()

    def _count(self, item: EvidenceRecord) -> None:
        complete: _Counts = {}
        if item.step != self._step:
            if self._is_time():
                complete = self._taken()
                self._enough = min(2 * self._enough, _CHECKS)
            self._step = item.step
            self._checks += 1
        key = (item.peers, item.surface, item.manifestation, item.layer, item.mode)
        known = self._counts.get(key)
        if known is None:
            _, surface, manifestation, layer, mode = key
            known = Agreement(
                surface=surface,
                manifestation=manifestation,
                layer=layer,
                mode=mode,
                count=0,
                first=item.step,
                last=item.step,
            )
        self._counts[key] = replace(known, count=known.count + 1, last=item.step)
        self._write(complete)  # last: it may fail

    def _is_time(self) -> bool:
        """Called at the beginning of a check, so that lines contain whole checks."""
        is_late = self._clock() - self._since >= _SECONDS
        return self._checks >= self._enough or is_late or len(self._counts) >= _MOST

    def _taken(self) -> _Counts:
        counts, self._counts = self._counts, {}
        self._checks, self._since = 0, self._clock()
        return counts

    def _write(self, counts: _Counts) -> None:
        by_peers: dict[tuple[int, ...], list[Agreement]] = {}
        for (peers, *_), each in counts.items():
            by_peers.setdefault(peers, []).append(each)
        with ExitStack() as lines:  # writes all lines, even if one fails
            for peers, surfaces in by_peers.items():
                lines.callback(self._recorder.record, Agreements(peers=peers, surfaces=tuple(surfaces)))


def has_finding(record: EvidenceRecord, config: StragglerConfig) -> bool:
    """Whether peers disagreed, or nothing was compared; times must differ materially."""
    if record.verdict is None:
        return True
    if record.verdict.agrees or record.manifestation is not Manifestation.STRAGGLER:
        return not record.verdict.agrees
    times = Times.of(record)
    return times is None or bool(times.slower(config))
