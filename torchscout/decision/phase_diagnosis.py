"""Who is slow to fetch batches, or to read and write checkpoints (paper, section 6, opening; 5.4).

These phases have boundaries of their own, so that their times are compared as they are, without a
replay. A survey is one comparison of every rank's recent times. Who asks for one, and when, is for the
observers to say; a rank that never leaves such a phase is a hang, for ``hang_diagnosis``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torchscout.config import StragglerConfig
from torchscout.decision.consensus import statistical
from torchscout.decision.persistence import Persistence, SlowRun, Times
from torchscout.decision.progress import Phase
from torchscout.decision.record import Action, EvidenceRecord, Incident, Manifestation, Scope
from torchscout.mesh import LayerKind, Mesh
from torchscout.utils.text import listed, named

__all__ = ["PhaseDiagnosis"]

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
            verdict=statistical(values, kappa=self._config.kappa, ratio=self._config.material_ratio),
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
