"""Slow ranks, phases and whole jobs, from times of many rounds (paper, sections 5.4 and 6.1.2).

``Baseline`` finds slowdowns that all peers share, by comparing with the job's own history. A vote among peers
cannot find those, and history does not show which rank is at fault, so the incident names no rank.

``PhaseDiagnosis`` finds ranks that are slow to fetch batches, or to read and write checkpoints. The times of
these phases are compared without a replay. A survey is one comparison of every rank's recent times; observers
decide when to make one. A rank that never leaves such a phase is a hang.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torchscout.config import BaselineConfig, StragglerConfig
from torchscout.decision.consensus import Status, robust_scale, statistical
from torchscout.decision.progress import Phase
from torchscout.decision.straggler.groups import GroupDiagnosis
from torchscout.decision.straggler.persistence import Chance, Persistence, SlowRun, Times
from torchscout.decision.straggler.ranks import RankStragglers, slow_rank
from torchscout.decision.straggler.timings import Timings
from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.mesh import LayerKind, Mesh

__all__ = ["Baseline", "PhaseDiagnosis", "Slowness", "Stragglers", "is_known"]


class Baseline:
    """Compares the time of every kind of work with its usual time.

    A slowdown is reported once, and again only after times were normal in between: a lasting change is not
    reported forever. Sequences of another length are another kind of work.
    """

    def __init__(self, config: BaselineConfig) -> None:
        self._config = config
        self._levels: dict[Hashable, _Level] = {}

    def suspicious_layers(self, records: Sequence[EvidenceRecord]) -> set[str | None]:
        """Return the layers for which these records would report the job as slow, without adding them."""
        return {
            record.layer
            for key, found in _by_work(records).items()
            if (level := self._levels.get(key)) is not None
            for record in found
            if level.would_confirm(record)
        }

    def observe(self, records: Sequence[EvidenceRecord]) -> list[Incident]:
        """Add the records of one round."""
        work = _by_work(records)
        levels = [(self._levels.setdefault(key, _Level(self._config)), found) for key, found in work.items()]
        slow = [slowdown for level, found in levels if (slowdown := level.observe(found))]
        return [_incident(slow, records[0].step)] if slow else []


@dataclass(frozen=True, slots=True)
class _Slowdown:
    """A kind of work that has become slower on all peers."""

    time: float
    usual: float
    records: tuple[EvidenceRecord, ...]
    """Its slow rounds, the latest first."""


class _Level:
    """The history of one kind of work among one peer group."""

    def __init__(self, config: BaselineConfig) -> None:
        self._config = config
        self._clean: deque[float] = deque(maxlen=config.history)
        self._usual = math.inf
        """The lowest median so far, since a rolling one would follow a gradual slowdown; infinite until there
        is enough history."""
        self._slow: list[EvidenceRecord] = []
        self._reported = False

    def would_confirm(self, record: EvidenceRecord) -> bool:
        if (time := _shared_time(record)) is None or self._reported:
            return False
        return time - self._usual > self._margin() and len(self._slow) + 1 >= self._config.confirmations

    def observe(self, records: Sequence[EvidenceRecord]) -> _Slowdown | None:
        """Add one round of this work; return the slowdown it confirms."""
        timed = {time: record for record in records if (time := _shared_time(record)) is not None}
        if not timed:
            return None
        time = statistics.median_high(timed)
        excess, margin = time - self._usual, self._margin()
        # Between half the margin and the margin a round is neither normal nor slow: it must not end a
        # slowdown that the next round would report again.
        if excess <= margin / 2:
            self._remember(time)
        elif excess > margin and not self._reported:
            return self._confirm(time, timed[time])
        return None

    def _margin(self) -> float:
        """How much above the usual time is slow; infinite until there is enough history."""
        if math.isinf(self._usual):
            return math.inf
        return max(
            (self._config.min_slowdown_ratio - 1) * self._usual,
            self._config.min_slowdown_ms,
            self._config.kappa * robust_scale(self._clean),
        )

    def _confirm(self, time: float, record: EvidenceRecord) -> _Slowdown | None:
        # Never added to the clean history: a slow round must not become the usual time.
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
    """The time that most peers took, if they agree."""
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
        "no rank stands out, so none is named.",
    )


_PURPOSES = {
    Phase.INPUT: "to fetch a batch",
    Phase.CHECKPOINT_READ: "to read a checkpoint",
    Phase.CHECKPOINT_WRITE: "to write a checkpoint",
}


class PhaseDiagnosis:
    """Turns each survey into incidents."""

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._mesh, self._config = mesh, config
        self._histories: dict[tuple[Phase, tuple[int, ...]], Persistence] = {}
        self._chances = {phase: Chance(config, len(mesh)) for phase in Phase}

    def observe(self, step: int, milliseconds: Mapping[Phase, Mapping[int, float]]) -> list[Incident]:
        """Add one survey: the recent time of each phase on each rank that timed it."""
        # Batches belong to data-parallel ranks, whatever experts they have.
        groups = [group.ranks for group in self._mesh.peer_groups(LayerKind.DENSE)]
        return [
            incident
            for phase, times in milliseconds.items()
            for peers in groups
            for incident in self._compare(step, phase, peers, times)
        ]

    def _compare(
        self, step: int, phase: Phase, peers: tuple[int, ...], times: Mapping[int, float]
    ) -> list[Incident]:
        timed = tuple(rank for rank in peers if rank in times)
        if len(timed) < 2 or 2 * len(timed) <= len(peers):
            return []  # such as when one rank writes for all
        values = [times[rank] for rank in timed]
        record = EvidenceRecord(
            step=step,
            surface=f"time/{phase.value}",
            manifestation=Manifestation.STRAGGLER,
            peers=timed,
            verdict=statistical(values, kappa=self._config.kappa, ratio=self._config.min_slowdown_ratio),
        )
        history = self._histories.setdefault((phase, peers), Persistence(self._config, self._chances[phase]))
        return [
            slow_rank(self._mesh, [run], step, partial(_sentence, phase, run))
            for run in history.observe([record])
        ]


def is_known(incident: Incident, known: Incident) -> bool:
    """Return whether another hub has reported a slow phase already, after which its ranks were never fast."""
    return (
        (known.manifestation, known.ranks) == (incident.manifestation, incident.ranks)
        and {record.surface for record in known.records} == {record.surface for record in incident.records}
        and min(record.step for record in incident.records) <= known.step
    )


def _sentence(phase: Phase, run: SlowRun, who: str, is_named: bool) -> str:
    times = Times.of(run.records[0])
    assert times is not None, "persistence confirms only what was compared"
    slow, usual = _rounded(times.of_rank[run.rank]), _rounded(times.reference)
    proof = f"slow in {len(run.records)} surveys since step {run.since}"
    if is_named:
        return f"{who} takes {slow} {_PURPOSES[phase]} where its peers take {usual}; {proof}"
    return (
        f"{who} differ: rank {run.rank} takes {slow} {_PURPOSES[phase]} where its peer takes {usual}; "
        f"{proof}, but two peers have no majority"
    )


def _rounded(milliseconds: float) -> str:
    return "less than 1 ms" if milliseconds < 1 else f"{milliseconds:.0f} ms"


@dataclass(frozen=True, slots=True)
class Slowness:
    """The result of one check of speed."""

    incidents: Sequence[Incident]
    records: Sequence[EvidenceRecord]
    """Those of comparisons with this rank."""


class Stragglers:
    """Three diagnoses of the same times: slow ranks, slow process groups and a slow job.

    Every rank receives the same times and reaches the same conclusions.
    """

    def __init__(self, mesh: Mesh, rank: int, straggler: StragglerConfig, baseline: BaselineConfig) -> None:
        self._rank = rank
        self._ranks = RankStragglers(mesh, straggler)
        self._groups = GroupDiagnosis(mesh, straggler)
        self._job = Baseline(baseline)

    def layers_to_time_again(self, timings: Timings) -> set[str | None]:
        """Return the layers for which these times would be reported as slow, without adding them.

        A rank that only waited for a core, or for a device that it shares, is fast the next time.
        """
        computation = timings.computation
        return self._ranks.suspicious_layers(computation) | self._job.suspicious_layers(computation)

    def observe(self, timings: Timings) -> Slowness:
        """Add the times of one check."""
        computation = timings.computation
        times, communication = timings.communication()
        records = [*computation, *communication]
        incidents = [
            *self._ranks.observe(computation),
            *self._groups.observe(timings.step, times, communication),
            *self._job.observe(records),
        ]
        return Slowness(incidents, [record for record in records if _has(record.peers, self._rank)])


def _has(peers: Sequence[int], rank: int) -> bool:
    """Whether a rank is among peers, which are ascending and may be thousands."""
    place = bisect_left(peers, rank)
    return place < len(peers) and peers[place] == rank
