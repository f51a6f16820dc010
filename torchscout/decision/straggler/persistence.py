"""Decides whether a rank is slow by chance or persistently (paper, sections 5.4 and 6.1).

The only place that knows direction (only slow counts), materiality and persistence. It keeps the recent
rounds of one surface among one peer group, without cold ones, and returns the ranks that were slow so often
that chance does not explain it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchscout.decision.consensus import Status, robust_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchscout.config import StragglerConfig
    from torchscout.decision.consensus import Verdict
    from torchscout.decision.record import EvidenceRecord

__all__ = ["Persistence", "SlowRun", "Times"]

# [Note: A slow round]
#
# Among few peers the scale of one round is itself noise: with 10% jitter and eight equal ranks, kappa 5 finds
# a slow outlier in 4% of all rounds, and misses a rank at twice the median in 8% of them. So a round is slow
# for a rank if it lies beyond kappa *pooled* scales: the median of the scales of recent rounds, each relative
# to its own round. The time of the slowest rank is left out of its own scale; otherwise a straggler among few
# peers would widen the scale that it is measured with. The rounds of an unfinished run are evaluated again as
# the pooled scale improves, so that the first, noisiest estimate of a new job is not final.
#
# The verdict of at least one round of the run must have named the rank, so that a surface with quiet and
# noisy layers, whose pooled scale is too small for some of them, reports only ranks that C3 has named.
# Requiring it in every round would miss too many stragglers.
#
# [Note: A run]
#
# A run lasts until the rank is as fast as its peers. A round in which it is materially slower, but within
# kappa, neither confirms nor ends the run; nor does a round that did not measure it. Otherwise the jitter
# that delays one confirmation would also void those before it.
#
# [Note: How many rounds]
#
# If a rank were slow by chance in a share p of its rounds, one of N ranks would be slow k times in a row
# about N * p**k times a round. The required k is the smallest that keeps this within ``false_alarm_rate``,
# and at least ``confirmations``. p is counted among the *other* ranks, so that a straggler does not raise its
# own k, and counts beginnings of runs, so that one lasting straggler does not hide the next. The prior lets a
# small quiet job report after ``confirmations`` rounds, and a few rounds of a large job outweigh it.
_PRIOR_SLOW, _PRIOR_SEEN = 0.5, 100.0


class Spread(NamedTuple):
    """The dispersion of the times of one round, relative to its reference."""

    slowest: int
    scale: float
    scale_without_slowest: float

    def scale_for(self, rank: int) -> float:
        return self.scale_without_slowest if rank == self.slowest else self.scale


@dataclass(frozen=True, slots=True)
class Times:
    """The usable durations of one comparison, in milliseconds."""

    of_rank: dict[int, float]
    """Finite times only."""
    reference: float
    """The median of the peers; of two peers, the faster one."""
    spread: Spread

    @classmethod
    def of(cls, record: EvidenceRecord) -> Times | None:
        """Return the times of a record; None if too few peers were timed to compare them."""
        if record.verdict is None:
            return None
        if (known := _recent.get(id(record))) is not None and known[0] is record:
            return known[1]
        found = cls._of(record, record.verdict)
        if len(_recent) >= _MOST_RECENT:
            _recent.clear()
        _recent[id(record)] = record, found
        return found

    @classmethod
    def _of(cls, record: EvidenceRecord, verdict: Verdict) -> Times | None:
        values = np.array(verdict.evidence, np.float64)
        usable = np.isfinite(values) & (values > 0)
        times, ranks = values[usable], np.array(record.peers)[usable]
        # Two peers that disagree are usable; in any other inconclusive round most peers were not timed.
        pair, unsettled = len(times) == 2, verdict.status is Status.INCONCLUSIVE
        if len(times) < 2 or (unsettled and not pair):
            return None
        slowest = int(times.argmax())
        reference = float(times.min() if pair else np.median(times))
        spread = Spread(
            slowest=int(ranks[slowest]),
            scale=robust_scale(times) / reference,
            scale_without_slowest=robust_scale(times if pair else np.delete(times, slowest)) / reference,
        )
        return cls(dict(zip(ranks.tolist(), times.tolist(), strict=True)), reference, spread)

    def slower(self, config: StragglerConfig) -> list[int]:
        """Ranks that are materially slower than the reference."""
        floor = max(config.min_slowdown_ratio * self.reference, self.reference + config.min_slowdown_ms)
        if self.of_rank[self.spread.slowest] < floor:
            return []
        return [rank for rank, time in self.of_rank.items() if time >= floor]

    def excess(self, rank: int) -> float:
        """How much slower than the reference, relative to it."""
        return self.of_rank[rank] / self.reference - 1


_recent: dict[int, tuple[EvidenceRecord, Times | None]] = {}
"""The times of records by identity: several diagnoses ask for those of one record, which has many in a large
job."""
_MOST_RECENT = 64


@dataclass(frozen=True, slots=True)
class SlowRun:
    """A rank that has been confirmed as slow."""

    rank: int
    records: tuple[EvidenceRecord, ...]
    """Its slow rounds: first the latest one whose verdict names the rank, then the others, oldest first."""

    @property
    def since(self) -> int:
        """The step of its first slow round."""
        return min(record.step for record in self.records)


@dataclass(slots=True)
class _Run:
    """The rounds since a rank fell behind its peers."""

    rounds: deque[tuple[float, EvidenceRecord]]
    """The excess in each round, with its record."""
    begun: bool = False
    """Whether one of the rounds was slow."""
    reported: bool = False


class _Round(NamedTuple):
    measured: int
    begun: tuple[int, ...]
    """The ranks whose run began in this round."""


class Persistence:
    """Recent rounds of one surface among one peer group, and the ranks that are slow in them."""

    def __init__(self, config: StragglerConfig) -> None:
        self._config = config
        self._spreads: deque[Spread] = deque(maxlen=config.history)
        self._rounds: deque[_Round] = deque(maxlen=config.history)
        self._runs: dict[int, _Run] = {}

    @property
    def confirmed(self) -> set[int]:
        """Ranks that were confirmed as slow, and have not been as fast as their peers since."""
        return {rank for rank, run in self._runs.items() if run.reported}

    @property
    def unconfirmed(self) -> set[int]:
        """Ranks that were slow, but not often enough to exclude chance."""
        return {rank for rank, run in self._runs.items() if run.begun and not run.reported}

    def would_confirm(self, record: EvidenceRecord) -> set[int]:
        """Return the ranks that this record would confirm as slow, or nearly so, without adding it."""
        if (times := Times.of(record)) is None:
            return set()
        found = set()
        for rank, (excess, _) in self._behind([(record, times)]).items():
            run = self._runs.get(rank)
            rounds = [excess, *(each for each, _ in run.rounds)] if run is not None else [excess]
            limit = self._limit(rank, times.spread)
            is_often = sum(each > limit for each in rounds) >= self._needed(rank, len(times.of_rank))
            if is_often and not (run is not None and run.reported):
                found.add(rank)
        return found

    def observe(self, records: Sequence[EvidenceRecord]) -> list[SlowRun]:
        """Add one round; return the runs it confirms.

        A round may time the surface in several layers; a rank that is slow in one of them is slow.
        """
        timed = [(record, times) for record in records if (times := Times.of(record)) is not None]
        if not timed:
            return []
        self._spreads.extend(times.spread for record, times in timed if not _unsettled(record))
        behind = self._behind(timed)
        measured = set[int]().union(*(times.of_rank for _, times in timed))
        for rank in self._runs.keys() & (measured - behind.keys()):
            del self._runs[rank]
        slow = {rank: self._slow_rounds(rank, *behind[rank]) for rank in sorted(behind)}
        begun = tuple(rank for rank, proof in slow.items() if proof and self._begins(rank))
        self._rounds.append(_Round(len(measured), begun))
        return [run for rank, proof in slow.items() if (run := self._confirm(rank, proof, len(measured)))]

    def _behind(
        self, timed: Sequence[tuple[EvidenceRecord, Times]]
    ) -> dict[int, tuple[float, EvidenceRecord]]:
        """Return every rank that is materially slower, with its largest excess."""
        behind: dict[int, tuple[float, EvidenceRecord]] = {}
        for record, times in timed:
            for rank in times.slower(self._config):
                if rank not in behind or behind[rank][0] < times.excess(rank):
                    behind[rank] = times.excess(rank), record
        return behind

    def _slow_rounds(self, rank: int, excess: float, record: EvidenceRecord) -> list[EvidenceRecord]:
        """Add a round to the run and return its slow ones. See [Note: A slow round]."""
        run = self._runs.setdefault(rank, _Run(deque(maxlen=self._config.history)))
        if run.reported:
            return []
        run.rounds.append((excess, record))
        limit = self._limit(rank)
        return [record for excess, record in run.rounds if excess > limit]

    def _limit(self, rank: int, *more: Spread) -> float:
        """The excess above which a round is slow."""
        # A pair that never agreed has no scale: only materiality counts.
        scales = [spread.scale_for(rank) for spread in (*self._spreads, *more)]
        return self._config.kappa * statistics.median(scales) if scales else 0.0

    def _begins(self, rank: int) -> bool:
        run = self._runs[rank]
        begins, run.begun = not run.begun, True
        return begins

    def _confirm(self, rank: int, proof: list[EvidenceRecord], peers: int) -> SlowRun | None:
        named = [place for place, record in enumerate(proof) if rank in record.ranks]
        shown = named or [place for place, record in enumerate(proof) if _unsettled(record)]
        if not shown or len(proof) < self._needed(rank, peers):
            return None
        self._runs[rank].reported = True
        self._runs[rank].rounds.clear()
        return SlowRun(rank, (proof.pop(shown[-1]), *proof))

    def _needed(self, rank: int, peers: int) -> int:
        """See [Note: How many rounds]."""
        others = sum(other != rank for past in self._rounds for other in past.begun)
        seen = sum(past.measured - 1 for past in self._rounds)
        rate = (_PRIOR_SLOW + others) / (_PRIOR_SEEN + seen)
        repeats = math.log(peers / self._config.false_alarm_rate) / -math.log(rate)
        return max(self._config.confirmations, math.ceil(repeats))


def _unsettled(record: EvidenceRecord) -> bool:
    return record.verdict is not None and record.verdict.status is Status.INCONCLUSIVE
