"""Times of checks, round after round: slow ranks, slow process groups, a slow job (paper, 5.4 and 6.1.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchscout.config import BaselineConfig, StragglerConfig
from torchscout.decision.baseline import Baseline
from torchscout.decision.cross_group import CrossGroupDiagnosis
from torchscout.decision.record import EvidenceRecord, Incident
from torchscout.decision.replay_diagnosis import ReplayDiagnosis
from torchscout.decision.timings import Timings
from torchscout.mesh import Mesh

__all__ = ["Slowness", "Stragglers"]


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
        self._groups = CrossGroupDiagnosis(mesh, straggler)
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
