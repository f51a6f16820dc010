"""Slow ranks, phases and whole jobs, from times of many rounds (paper, sections 5.4 and 6.1.2).

``Baseline`` finds slowdowns that all peers share, against the job's own clean history. A vote among peers
cannot see those, and history cannot say which rank is at fault: the incident is the job's and names no
rank.

``PhaseDiagnosis`` finds who is slow to fetch batches, or to read and write checkpoints. These phases have
boundaries of their own, so that their times are compared as they are, without a replay. A survey is one
comparison of every rank's recent times; the observers decide when to make one. A rank that never leaves
such a phase is a hang.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchscout.config import BaselineConfig, StragglerConfig
from torchscout.decision.consensus import Status, robust_scale, statistical
from torchscout.decision.progress import Phase
from torchscout.decision.record import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.decision.sdc import ReplayDiagnosis
from torchscout.decision.straggler.groups import GroupDiagnosis
from torchscout.decision.straggler.persistence import Persistence, SlowRun, Times
from torchscout.decision.straggler.timings import Timings
from torchscout.mesh import LayerKind, Mesh
from torchscout.utils.text import listed, named

__all__ = ["Baseline", "PhaseDiagnosis", "Slowness", "Stragglers"]


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
            (self._config.min_slowdown_ratio - 1) * self._usual,
            self._config.min_slowdown_ms,
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


_PURPOSES = {
    Phase.INPUT: "to fetch a batch",
    Phase.CHECKPOINT_READ: "to read a checkpoint",
    Phase.CHECKPOINT_WRITE: "to write a checkpoint",
}


class _Compared(NamedTuple):
    """One history: a phase among the peers that timed it."""

    phase: Phase
    peers: tuple[int, ...]


class PhaseDiagnosis:
    """Turns each survey into incidents; remembers only what persistence needs."""

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._mesh = mesh
        self._config = config
        self._histories: dict[_Compared, Persistence] = {}

    def observe(self, step: int, milliseconds: Mapping[Phase, Mapping[int, float]]) -> list[Incident]:
        """Take in one survey: what each phase took lately on each rank that timed it."""
        # Batches belong to data-parallel ranks, whoever holds which experts.
        groups = [group.ranks for group in self._mesh.peer_groups(LayerKind.DENSE)]
        return [
            incident
            for phase, times in milliseconds.items()
            for peers in groups
            for incident in self._compare(step, _Compared(phase, peers), times)
        ]

    def _compare(self, step: int, compared: _Compared, times: Mapping[int, float]) -> list[Incident]:
        timed = tuple(rank for rank in compared.peers if rank in times)
        if len(timed) < 2 or 2 * len(timed) <= len(compared.peers):
            return []  # most peers have nothing to compare with, as when one rank writes for all
        values = [times[rank] for rank in timed]
        record = EvidenceRecord(
            step=step,
            surface=f"time/{compared.phase.value}",
            manifestation=Manifestation.STRAGGLER,
            peers=timed,
            verdict=statistical(values, kappa=self._config.kappa, ratio=self._config.min_slowdown_ratio),
        )
        history = self._histories.setdefault(compared, Persistence(self._config))
        return [self._incident(compared.phase, run, step) for run in history.observe([record])]

    def _incident(self, phase: Phase, run: SlowRun, step: int) -> Incident:
        deciding = run.records[0]
        attributed = run.rank in deciding.ranks
        ranks = (run.rank,) if attributed else deciding.peers
        return Incident(
            manifestation=Manifestation.STRAGGLER,
            scope=Scope.RANK if attributed else Scope.PEER_GROUP,
            step=step,
            ranks=ranks,
            hosts=self._mesh.hosts_of(ranks),
            records=run.records,
            action=Action.INSPECT,
            sentence=self._sentence(phase, run, ranks),
        )

    def _sentence(self, phase: Phase, run: SlowRun, ranks: tuple[int, ...]) -> str:
        times, hosts = Times.of(run.records[0]), self._mesh.hosts_of(ranks)
        assert times is not None, "persistence reports what it could compare"
        who = f"{named(ranks)} on {listed(hosts)}" if hosts else named(ranks)
        slow, usual = _spoken(times.of_rank[run.rank]), _spoken(times.reference)
        purpose = _PURPOSES[phase]
        since = min(record.step for record in run.records)
        proof = f"slow in {len(run.records)} surveys since step {since}"
        if len(ranks) == 1:
            return f"{who} takes {slow} {purpose} where its peers take {usual}; {proof}"
        return (
            f"{who} differ: rank {run.rank} takes {slow} {purpose} where its peer takes {usual}; "
            f"{proof}, but two peers have no majority"
        )


def _spoken(milliseconds: float) -> str:
    return "less than 1 ms" if milliseconds < 1 else f"{milliseconds:.0f} ms"


@dataclass(frozen=True, slots=True)
class Slowness:
    """What one check has to say about speed."""

    incidents: Sequence[Incident]
    records: Sequence[EvidenceRecord]
    """Those in which this rank takes part."""


class Stragglers:
    """Three diagnoses of the same times; every rank is fed alike and concludes alike."""

    def __init__(self, mesh: Mesh, rank: int, straggler: StragglerConfig, baseline: BaselineConfig) -> None:
        self._rank = rank
        self._ranks = ReplayDiagnosis(mesh, straggler)
        self._groups = GroupDiagnosis(mesh, straggler)
        self._job = Baseline(baseline)

    def doubted(self, timings: Timings) -> set[str | None]:
        """Layers to time again before these times are observed: somebody would be reported as slow for them.

        A rank that had to wait for a core, or for a device that it shares with others, is fast the next time.
        """
        computation = timings.computation()
        return self._ranks.lagging(computation) | self._job.lagging(computation)

    def observe(self, timings: Timings) -> Slowness:
        computation = timings.computation()
        times, communication = timings.communication()
        records = [*computation, *communication]
        incidents = [
            *self._ranks.observe(computation),
            *self._groups.observe(timings.step, times, communication),
            *self._job.observe(records),
        ]
        return Slowness(incidents, [record for record in records if self._rank in record.peers])
