"""Slowdowns that all peers share, found against the job's own clean history (paper, section 5.4).

A vote among peers cannot see what slows them all, and history cannot say who is at fault: the
incident is the job's and names nobody. One slow rank is ``replay_diagnosis``'s, one slow process group
``cross_group``'s.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torchscout.config import BaselineConfig
from torchscout.decision.consensus import Status, robust_scale
from torchscout.decision.persistence import Times
from torchscout.decision.record import Action, EvidenceRecord, Incident, Manifestation, Scope

__all__ = ["Baseline"]


class Baseline:
    """The usual time of every kind of work, and what takes longer now.

    A slowdown is reported once, and again only after times were normal in between: a change that is
    there to stay does not alarm for ever. Longer sequences are other work and start afresh.
    """

    def __init__(self, config: BaselineConfig) -> None:
        self._config = config
        self._levels: dict[Hashable, _Level] = {}

    def lagging(self, records: Sequence[EvidenceRecord]) -> set[str | None]:
        """Layers in which these records would make the job be reported as slow. Nothing is taken in."""
        return {
            record.layer
            for key, found in _by_work(records).items()
            for record in found
            if key in self._levels and self._levels[key].would_confirm(record)
        }

    def observe(self, records: Sequence[EvidenceRecord]) -> list[Incident]:
        """Take in the records of one round."""
        work = _by_work(records)
        levels = [(self._levels.setdefault(key, _Level(self._config)), found) for key, found in work.items()]
        slow = [slowdown for level, found in levels if (slowdown := level.observe(found))]
        return [_incident(slow, records[0].step)] if slow else []


@dataclass(frozen=True, slots=True)
class _Slowdown:
    """One kind of work that has become slower on all peers."""

    time: float
    usual: float
    records: tuple[EvidenceRecord, ...]
    """Its slow rounds, the latest first."""


class _Level:
    """The clean history of one kind of work among one peer group."""

    def __init__(self, config: BaselineConfig) -> None:
        self._config = config
        self._clean: deque[float] = deque(maxlen=config.history)
        self._usual = math.inf
        """The fastest level so far; infinite while there is too little history.

        A rolling median alone would follow a gradual slowdown.
        """
        self._slow: list[EvidenceRecord] = []
        self._reported = False

    def would_confirm(self, record: EvidenceRecord) -> bool:
        if (time := _shared_time(record)) is None or self._reported:
            return False
        return time - self._usual > self._margin() and len(self._slow) + 1 >= self._config.confirmations

    def observe(self, records: Sequence[EvidenceRecord]) -> _Slowdown | None:
        """Take in one round of this work; return the slowdown it confirms."""
        timed = {time: record for record in records if (time := _shared_time(record)) is not None}
        if not timed:
            return None
        time = statistics.median_high(timed)
        excess, margin = time - self._usual, self._margin()
        # Between half the margin and all of it a round is neither normal nor slow: it must not end a
        # slowdown, only for the next round to report it anew.
        if excess <= margin / 2:
            self._remember(time)
        elif excess > margin and not self._reported:
            return self._confirm(time, timed[time])
        return None

    def _margin(self) -> float:
        """How much above the usual time is slow; infinite until enough is known."""
        if math.isinf(self._usual):
            return math.inf
        return max(
            (self._config.material_ratio - 1) * self._usual,
            self._config.material_ms,
            self._config.kappa * robust_scale(self._clean),
        )

    def _confirm(self, time: float, record: EvidenceRecord) -> _Slowdown | None:
        # Never remembered as clean: a slow round would become the measure of the next.
        self._slow.append(record)
        if len(self._slow) < self._config.confirmations:
            return None
        self._reported = True
        return _Slowdown(time, self._usual, tuple(reversed(self._slow)))

    def _remember(self, time: float) -> None:
        self._slow.clear()
        self._reported = False
        self._clean.append(time)
        if len(self._clean) >= self._config.warmup:
            self._usual = min(self._usual, statistics.median(self._clean))


def _by_work(records: Sequence[EvidenceRecord]) -> dict[Hashable, list[EvidenceRecord]]:
    work: dict[Hashable, list[EvidenceRecord]] = defaultdict(list)
    for record in records:
        if record.manifestation is Manifestation.STRAGGLER:
            work[record.peers, record.surface, record.shape, record.mode].append(record)
    return work


def _shared_time(record: EvidenceRecord) -> float | None:
    """The time most peers took, if they agree on one."""
    if record.verdict is None or record.verdict.status is Status.INCONCLUSIVE:
        return None
    times = Times.of(record)
    return None if times is None else times.reference


def _incident(slow: Sequence[_Slowdown], step: int) -> Incident:
    worst = max(slow, key=lambda slowdown: slowdown.time / slowdown.usual)
    deciding = worst.records[0]
    more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
    others = (record for slowdown in slow if slowdown is not worst for record in slowdown.records)
    return Incident(
        manifestation=Manifestation.STRAGGLER,
        scope=Scope.JOB,
        step=step,
        ranks=(),
        hosts=(),
        records=(*worst.records, *others),
        action=Action.INSPECT,
        sentence=f"All {len(deciding.peers)} peers have become slower together: {deciding.surface}{more} "
        f"takes {worst.time:.1f} ms at step {step}, usually {worst.usual:.1f} ms; "
        f"no rank stands out, so none is named.",
    )
