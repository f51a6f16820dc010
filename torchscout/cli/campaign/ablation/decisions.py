"""Decisions that lack a piece of the method, over the evidence of real runs. Pure; nothing else uses them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchscout.cli.campaign.ablation.outcome import Claim, claims_of
from torchscout.config import StragglerConfig
from torchscout.decision.consensus import exact, statistical
from torchscout.decision.progress import RankStatus
from torchscout.decision.record import EvidenceRecord, Manifestation
from torchscout.decision.recorder import Stamped
from torchscout.decision.sdc import COMPUTATION, ReplayDiagnosis
from torchscout.decision.straggler.persistence import Times
from torchscout.mesh import Mesh

__all__ = ["RawStepTimes", "coordinate_vote", "first_to_differ", "first_to_time_out", "unconfirmed"]


def first_to_differ(written: Mapping[int, Sequence[Stamped]]) -> set[Claim]:
    """Without a majority: peers see that their numbers differ, and whoever says so first is blamed.

    ``written`` has what each rank wrote down.
    """
    moments = [
        (line.monotonic, rank)
        for rank, lines in written.items()
        for line in lines
        if isinstance(line.item, EvidenceRecord)
        and line.item.manifestation is Manifestation.SDC
        and line.item.scope is not None
    ]
    return {Claim(Manifestation.SDC, (min(moments)[1],))} if moments else set()


def first_to_time_out(standings: Iterable[RankStatus]) -> set[Claim]:
    """Without a majority: the rank that has waited longest inside a collective is the first to give up."""
    waiting = [
        each.progress for each in standings if each.progress is not None and each.progress.at_communication
    ]
    if not waiting:
        return set()
    first = max(waiting, key=lambda progress: progress.silent_seconds)
    return {Claim(Manifestation.HANG, (first.rank,))}


def unconfirmed(records: Iterable[EvidenceRecord], config: StragglerConfig) -> set[Claim]:
    """Without confirmation: one replay that differs, or one slow round, is enough."""
    claims = set()
    for record in records:
        if not record.ranks:
            continue
        if record.manifestation is Manifestation.SDC:
            claims.add(Claim(Manifestation.SDC, record.ranks))
        elif record.surface in COMPUTATION:
            claims |= {Claim(Manifestation.STRAGGLER, (rank,)) for rank in _materially_slow(record, config)}
    return claims


def _materially_slow(record: EvidenceRecord, config: StragglerConfig) -> list[int]:
    times = Times.of(record)
    if times is None:
        return []
    slower = times.slower(config)
    return [rank for rank in record.ranks if rank in slower]


class RawStepTimes:
    """Without controlled replay: how long each rank's own step took, judged as replayed layers are.

    Only the measurement differs: outliers, materiality and confirmation are the same.
    """

    def __init__(self, mesh: Mesh, config: StragglerConfig) -> None:
        self._diagnosis = ReplayDiagnosis(mesh, config)

    def observe(self, step: int, seconds: Sequence[float]) -> set[Claim]:
        """``seconds`` by rank."""
        record = EvidenceRecord(
            step=step,
            surface="time/module",
            manifestation=Manifestation.STRAGGLER,
            peers=tuple(range(len(seconds))),
            verdict=statistical([1e3 * each for each in seconds]),
        )
        return claims_of(self._diagnosis.observe([record]))


def coordinate_vote(standings: Sequence[RankStatus], mesh: Mesh) -> set[Claim]:
    """Without the wait graph: whoever stands elsewhere than the majority of its peers is blamed."""
    where = {each.rank: (-1, -1) if each.progress is None else each.progress.coordinate for each in standings}
    behind: list[int] = []
    for group in mesh.peer_groups():
        peers = [rank for rank in group.ranks if rank in where]
        numbers = [(where[rank][0] << 32) + where[rank][1] for rank in peers]
        behind += [peers[position] for position in exact(numbers).outliers] if len(peers) > 1 else []
    return {Claim(Manifestation.HANG, tuple(sorted(behind)))} if behind else set()
