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
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchscout.decision.consensus import MANY, Status, dispersion_of, robust_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from torchscout.config import StragglerConfig
    from torchscout.decision.consensus import Dispersion
    from torchscout.decision.types import EvidenceRecord

__all__ = ["Chance", "Persistence", "SlowRun", "Spread", "Times"]

# [Note: A slow round]
#
# Among few peers the scale of one round is itself noise: with 10% jitter and eight equal ranks, kappa 5 finds
# a slow outlier in 4% of all rounds, and misses a rank at twice the median in 8% of them. So a round is slow
# for a rank if it lies beyond kappa *pooled* scales: the median of the scales of recent rounds, each relative
# to its own round. The time of the slowest rank is left out of its own scale; otherwise a straggler among few
# peers would widen the scale that it is measured with. The rounds of an unfinished run are evaluated again as
# the pooled scale improves, so that the first, noisiest estimate of a new job is not final. The scale is
# never below the usual one of all peer groups of the job: two or three peers may be alike in a few rounds by
# chance, and two that never agreed have no scale at all.
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
# and at least ``confirmations``. N is the number of ranks in the job and p is counted among all of them,
# since a job of many small peer groups has as many chances to be wrong as one large group. p is counted among
# the *other* ranks, so that a straggler does not raise its own k, and counts beginnings of runs, so that one
# lasting straggler does not hide the next. The prior lets a small quiet job report after ``confirmations``
# rounds, and a few rounds of a large job outweigh it.
_PRIOR_SLOW, _PRIOR_SEEN = 0.5, 100.0


class Spread(NamedTuple):
    """The dispersion of the times of one round, relative to its reference."""

    slowest: int
    scale: float
    scale_without_slowest: float

    def scale_for(self, rank: int) -> float:
        return self.scale_without_slowest if rank == self.slowest else self.scale


class Times:
    """The usable durations of one comparison, in milliseconds: an array, since a large job has many."""

    def __init__(
        self,
        ranks: npt.NDArray[np.int64],
        times: npt.NDArray[np.float64],
        dispersion: Dispersion | None = None,
    ) -> None:
        """``times`` are those of ``ranks``: at least two, finite and positive."""
        self._ranks, self._times = ranks, times
        slowest = int(times.argmax())
        center, scale = dispersion or dispersion_of(times)
        self.reference = float(times.min()) if len(times) == 2 else center
        """The median of the peers; of two peers, the faster one."""
        without_slowest = scale
        if 2 < len(times) < MANY:  # one of many does not change it
            without_slowest = robust_scale(np.delete(times, slowest))
        self.spread = Spread(int(ranks[slowest]), scale / self.reference, without_slowest / self.reference)
        self._longest = float(times[slowest])

    @classmethod
    def of(cls, record: EvidenceRecord) -> Times | None:
        """Return the times of a record; None if too few peers were timed to compare them."""
        if record.verdict is None:
            return None
        if (known := _recent.get(id(record))) is not None and known[0] is record:
            return known[1]
        return cls.remember(record, np.array(record.peers), np.array([*record.verdict.evidence], np.float64))

    @classmethod
    def remember(
        cls,
        record: EvidenceRecord,
        ranks: npt.NDArray[np.int64],
        values: npt.NDArray[np.float64],
        dispersion: Dispersion | None = None,
    ) -> Times | None:
        """The same for a record of which peers and evidence are known as arrays, and perhaps the dispersion
        of the evidence."""
        assert record.verdict is not None
        usable = np.isfinite(values) & (values > 0)
        if not usable.all():
            ranks, values, dispersion = ranks[usable], values[usable], None
        # Two peers that disagree are usable; in any other inconclusive round most peers were not timed.
        is_unsettled = record.verdict.status is Status.INCONCLUSIVE and len(values) != 2
        found = None if len(values) < 2 or is_unsettled else cls(ranks, values, dispersion)
        earlier = next((each.step for each, _ in _recent.values()), record.step)
        if len(_recent) >= _MOST_RECENT or earlier != record.step:
            _recent.clear()
        _recent[id(record)] = record, found
        return found

    def __len__(self) -> int:
        """How many peers were timed."""
        return len(self._times)

    @cached_property
    def of_rank(self) -> dict[int, float]:
        """The time of each rank."""
        return dict(zip(self._ranks.tolist(), self._times.tolist(), strict=True))

    def slower(self, config: StragglerConfig) -> dict[int, float]:
        """Return the ranks that are materially slower than the reference, and by how much, relative to it."""
        floor = max(config.min_slowdown_ratio * self.reference, self.reference + config.min_slowdown_ms)
        if self._longest < floor:
            return {}
        is_slow = self._times >= floor
        excess = self._times[is_slow] / self.reference - 1
        return dict(zip(self._ranks[is_slow].tolist(), excess.tolist(), strict=True))


_recent: dict[int, tuple[EvidenceRecord, Times | None]] = {}
"""The times of one check's records by identity: several diagnoses ask for those of one record, which has many
in a large job."""
_MOST_RECENT = 1024


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
    step: int
    measured: int
    begun: frozenset[int]
    """The ranks whose run began in this round."""


class Chance:
    """How often ranks were slow by chance in recent rounds of one surface, and how far their times differ.

    See [Note: How many rounds] and [Note: A slow round].
    """

    def __init__(self, config: StragglerConfig, ranks: int = 0) -> None:
        """``ranks`` are those of the job, if its peer groups share this."""
        self._config, self._ranks = config, ranks
        self._rounds: deque[_Round] = deque(maxlen=config.history)
        self._scales: deque[float] = deque(maxlen=config.history)

    @property
    def scale(self) -> float:
        """The usual scale of a peer group, without its slowest rank; 0 if none is known."""
        return statistics.median(self._scales) if self._scales else 0.0

    def add_spreads(self, spreads: Sequence[Spread]) -> None:
        self._scales.extend(each.scale_without_slowest for each in spreads)

    def add(self, step: int, measured: int, begun: frozenset[int]) -> None:
        """Add one round of a peer group; those of one step are one round of the job."""
        if self._rounds and self._rounds[-1].step == step:
            last = self._rounds.pop()
            measured, begun = measured + last.measured, begun | last.begun
        self._rounds.append(_Round(step, measured, begun))

    def needed(self, rank: int, peers: int) -> int:
        """Return how many rounds of a rank must be slow."""
        others = sum(len(past.begun) - (rank in past.begun) for past in self._rounds)
        seen = sum(past.measured - 1 for past in self._rounds)
        rate = (_PRIOR_SLOW + others) / (_PRIOR_SEEN + seen)
        repeats = math.log(max(peers, self._ranks) / self._config.false_alarm_rate) / -math.log(rate)
        return max(self._config.confirmations, math.ceil(repeats))


class Persistence:
    """Recent rounds of one surface among one peer group, and the ranks that are slow in them."""

    def __init__(self, config: StragglerConfig, chance: Chance | None = None) -> None:
        self._config, self._chance = config, chance or Chance(config)
        self._spreads: deque[Spread] = deque(maxlen=config.history)
        self._runs: dict[int, _Run] = {}

    @property
    def confirmed(self) -> set[int]:
        """Ranks that were confirmed as slow, and have not been as fast as their peers since."""
        return {rank for rank, run in self._runs.items() if run.reported}

    @property
    def behind(self) -> set[int]:
        """Ranks that were materially slower than their peers when they were last measured."""
        return {*self._runs}

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
            is_often = sum(each > limit for each in rounds) >= self._chance.needed(rank, len(times))
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
        spreads = [times.spread for record, times in timed if not _unsettled(record)]
        self._spreads.extend(spreads)
        self._chance.add_spreads(spreads)
        behind = self._behind(timed)
        for rank in self._runs.keys() - behind.keys():
            if any(rank in times.of_rank for _, times in timed):
                del self._runs[rank]
        several = chain.from_iterable(times.of_rank for _, times in timed)
        measured = len(timed[0][1]) if len(timed) == 1 else len({*several})
        slow = {rank: self._slow_rounds(rank, *behind[rank]) for rank in sorted(behind)}
        begun = frozenset(rank for rank, proof in slow.items() if proof and self._begins(rank))
        self._chance.add(timed[0][0].step, measured, begun)
        return [run for rank, proof in slow.items() if (run := self._confirm(rank, proof, measured))]

    def _behind(
        self, timed: Sequence[tuple[EvidenceRecord, Times]]
    ) -> dict[int, tuple[float, EvidenceRecord]]:
        """Return every rank that is materially slower, with its largest excess."""
        behind: dict[int, tuple[float, EvidenceRecord]] = {}
        for record, times in timed:
            for rank, excess in times.slower(self._config).items():
                if rank not in behind or behind[rank][0] < excess:
                    behind[rank] = excess, record
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
        scales = [spread.scale_for(rank) for spread in (*self._spreads, *more)]
        return self._config.kappa * max(statistics.median(scales or [0.0]), self._chance.scale)

    def _begins(self, rank: int) -> bool:
        run = self._runs[rank]
        begins, run.begun = not run.begun, True
        return begins

    def _confirm(self, rank: int, proof: list[EvidenceRecord], peers: int) -> SlowRun | None:
        named = [place for place, record in enumerate(proof) if rank in record.ranks]
        shown = named or [place for place, record in enumerate(proof) if _unsettled(record)]
        if not shown or len(proof) < self._chance.needed(rank, peers):
            return None
        self._runs[rank].reported = True
        self._runs[rank].rounds.clear()
        return SlowRun(rank, (proof.pop(shown[-1]), *proof))


def _unsettled(record: EvidenceRecord) -> bool:
    return record.verdict is not None and record.verdict.status is Status.INCONCLUSIVE
