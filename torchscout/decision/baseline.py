"""Finds slowdowns that all peers share, by comparing times with the job's own history, and puts the three
diagnoses of one check together.

A vote among peers cannot find a slowdown of all, and history does not show which rank is at fault, so the
incident names no rank.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchscout.config import BaselineConfig, StragglerConfig
from torchscout.decision.consensus import robust_scale
from torchscout.decision.groups import GroupStragglers
from torchscout.decision.straggler import RankStragglers
from torchscout.decision.timings import PeerTimes, Timings
from torchscout.decision.types import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.mesh import Mesh

__all__ = ["Baseline", "Slowness", "Stragglers"]

_KINDS = 64
"""Kinds of work whose history is kept, the latest ones: every sequence length is another kind."""


class _Slowdown(NamedTuple):
    """A kind of work that takes all peers longer than usual."""

    time: float
    usual: float
    records: tuple[EvidenceRecord, ...]
    """Its slow rounds, the latest first."""


class Baseline:
    """Compares the time of every kind of work with its usual time.

    A slowdown is reported once, and again only after times were normal in between: a lasting change is not
    reported forever. Sequences of another length are another kind of work.
    """

    def __init__(self, config: BaselineConfig) -> None:
        self._config = config
        self._levels = OrderedDict[Hashable, _Level]()

    def suspicious_layers(self, comparisons: Iterable[PeerTimes]) -> set[str]:
        """Return the layers for which these would report the job as slow, without adding them."""
        return {
            each.work.layer
            for found in _by_kind(comparisons).items()
            if (level := self._levels.get(found[0])) is not None
            for each in found[1]
            if level.would_confirm(_shared(each))
        }

    def observe(self, comparisons: Iterable[PeerTimes]) -> list[Incident]:
        """Add the comparisons of one round."""
        slow = list[_Slowdown]()
        for kind, found in _by_kind(comparisons).items():
            level = self._levels.setdefault(kind, _Level(self._config))
            self._levels.move_to_end(kind)
            if (slowdown := level.observe(found)) is not None:
                slow.append(slowdown)
        while len(self._levels) > _KINDS:
            self._levels.popitem(last=False)
        return [_incident(slow)] if slow else []


def _by_kind(comparisons: Iterable[PeerTimes]) -> dict[Hashable, list[PeerTimes]]:
    """Group the comparisons by kind of work. Which layer is replayed makes no difference."""
    found: dict[Hashable, list[PeerTimes]] = defaultdict(list)
    for each in comparisons:
        if (each.counts >= 2).any():
            found[each.work.surface, each.work.shape].append(each)
    return found


def _shared(comparison: PeerTimes) -> float:
    """Return the time that all ranks took at least; of eight or more, one in eight may be faster."""
    times = np.sort(comparison.times[~np.isnan(comparison.times)])
    return float(times[len(times) // 8])


class _Level:
    """The history of one kind of work."""

    def __init__(self, config: BaselineConfig) -> None:
        self._config = config
        self._clean: deque[float] = deque(maxlen=config.history)
        self._usual = math.inf
        """The lowest median so far, since a rolling one would follow a gradual slowdown; infinite until there
        is enough history."""
        self._slow: list[EvidenceRecord] = []
        self._reported = False

    def would_confirm(self, time: float) -> bool:
        is_slow = time - self._usual > self._margin()
        return is_slow and not self._reported and len(self._slow) + 1 >= self._config.confirmations

    def observe(self, comparisons: Sequence[PeerTimes]) -> _Slowdown | None:
        """Add one round of this work; return the slowdown that it confirms."""
        ordered = sorted(comparisons, key=_shared)
        middle = ordered[len(ordered) // 2]
        time = _shared(middle)
        excess, margin = time - self._usual, self._margin()
        # Between half the margin and the margin a round is neither normal nor slow: it must not end a
        # slowdown that the next round would report again.
        if excess <= margin / 2:
            self._remember(time)
        elif excess > margin and not self._reported:
            # Never added to the clean history: a slow round must not become the usual time.
            self._slow.insert(0, middle.record(int(middle.counts.argmax())))
            if len(self._slow) >= self._config.confirmations:
                self._reported = True
                return _Slowdown(time, self._usual, tuple(self._slow))
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

    def _remember(self, time: float) -> None:
        self._slow.clear()
        self._reported = False
        self._clean.append(time)
        if len(self._clean) >= self._config.warmup:
            self._usual = min(self._usual, statistics.median(self._clean))


def _incident(slow: Sequence[_Slowdown]) -> Incident:
    worst = max(slow, key=lambda slowdown: slowdown.time / slowdown.usual)
    deciding = worst.records[0]
    more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
    others = [record for slowdown in slow if slowdown is not worst for record in slowdown.records]
    return Incident(
        manifestation=Manifestation.STRAGGLER,
        scope=Scope.JOB,
        step=deciding.step,
        ranks=(),
        hosts=(),
        records=(*worst.records, *others),
        action=Action.INSPECT,
        sentence=f"All peers have become slower together: {deciding.surface}{more} takes them at least "
        f"{worst.time:.1f} ms at step {deciding.step}, usually {worst.usual:.1f} ms; "
        "no rank stands out, so none is named.",
    )


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
        self._rank, self._config = rank, straggler
        self._ranks = RankStragglers(mesh, straggler)
        self._groups = GroupStragglers(mesh, straggler)
        self._job = Baseline(baseline)

    def layers_to_time_again(self, timings: Timings) -> set[str]:
        """Return the layers for which these times would be reported as slow, without adding them.

        A rank that only waited for a core, or for a device that it shares, is fast the next time.
        """
        computation = [*timings.computation(self._config)]
        return self._ranks.suspicious_layers(computation) | self._job.suspicious_layers(computation)

    def observe(self, timings: Timings) -> Slowness:
        """Add the times of one check."""
        computation = [*timings.computation(self._config)]
        in_groups, communication, records = self._groups.observe(timings.step, timings.communication())
        incidents = [
            *self._ranks.observe(computation),
            *in_groups,
            *self._job.observe([*computation, *communication]),
        ]
        own = [each.record(row) for each in computation if (row := each.row_of(self._rank)) is not None]
        return Slowness(incidents, own + records)
