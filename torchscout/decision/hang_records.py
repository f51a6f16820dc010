"""The comparisons that prove a hang or a crash, as evidence records (paper, sections 5 and 7)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torchscout.decision.consensus import exact
from torchscout.decision.divergence import Divergence
from torchscout.decision.hang_graph import Evidence
from torchscout.decision.progress import IssuedOp, Process, RankReport
from torchscout.decision.types import EvidenceRecord, Manifestation, Status, Surface, Verdict
from torchscout.mesh import Mesh

__all__ = [
    "of_coordinates",
    "of_cycle",
    "of_devices",
    "of_divergence",
    "of_ends",
    "of_groups",
    "shown",
    "silence",
    "undecided",
]

MOST = 8
"""Records of one kind in an incident, at most: the hang of a large job touches thousands of groups."""
_SUSPECTS, _VICTIMS = 8, 3
"""How many stacks an incident contains at most."""


def of_groups(evidence: Evidence, groups: Iterable[str], suspects: Collection[int]) -> list[EvidenceRecord]:
    """Compare how many operations of each group its members have issued, or their devices have entered.

    A suspect that did not answer counts as -1.
    """
    records = []
    for key in list(dict.fromkeys(groups))[:MOST]:
        peers = _peers(evidence, evidence.groups[key].members, suspects)
        on_device = any(_entered(evidence, rank, key) is not None for rank in peers)
        counts = [evidence.issued(rank, key) for rank in peers]
        if on_device:
            known = [_entered(evidence, rank, key) for rank in peers]
            counts = [
                issued if each is None else min(issued, each)
                for issued, each in zip(counts, known, strict=True)
            ]
        surface = f"{'entered' if on_device else 'issued'}/{evidence.groups[key].name}"
        records.append(_record(evidence, surface, peers, exact(counts), suspects))
    return records


def of_divergence(evidence: Evidence, found: Sequence[Divergence]) -> list[EvidenceRecord]:
    """Compare what members issued as the same number."""
    return [
        _record(evidence, f"{each.compared}/{each.group.name}", each.voters, each.verdict, each.ranks)
        for each in found[:MOST]
    ]


def of_cycle(evidence: Evidence, inside: dict[int, IssuedOp], guilty: int | None) -> EvidenceRecord:
    """Show which operation each rank of a cycle is in; operations are numbered in order of appearance."""
    ranks, places = (*inside,), [(each.group, each.number) for each in inside.values()]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    verdict = exact([numbers[place] for place in places])
    if guilty is not None:
        verdict = Verdict(Status.ATTRIBUTED, (ranks.index(guilty),), verdict.evidence)
    return _record(evidence, "deadlock", ranks, verdict, ranks)


def of_devices(evidence: Evidence, suspects: Sequence[int]) -> EvidenceRecord:
    """Show which devices have work left (1 or 0): all that is known about the inside of CUDA graphs."""
    busy = {
        rank: int(each.progress.device_busy)
        for rank, each in evidence.reports.items()
        if each.progress is not None and each.progress.device_busy is not None
    }
    ranks = tuple(sorted(busy))
    named = tuple(place for place, rank in enumerate(ranks) if rank in suspects)
    is_decided = not all(busy[ranks[place]] for place in named)
    status = Status.ATTRIBUTED if is_decided else Status.INCONCLUSIVE
    verdict = Verdict(status, named if is_decided else (), tuple(busy[rank] for rank in ranks))
    return _record(evidence, "device", ranks, verdict, suspects)


def of_ends(evidence: Evidence, suspects: Sequence[int], *, is_decided: bool = True) -> EvidenceRecord:
    """Show which trainers have ended early (1 or 0), first of all the suspects. It needs no vote."""
    ranks = tuple(sorted({*evidence.reports, *suspects}))
    ended = tuple(
        int(rank not in evidence.reports or evidence.reports[rank].gone_seconds is not None) for rank in ranks
    )
    named = set(suspects)
    outliers = tuple(place for place, rank in enumerate(ranks) if rank in named) if is_decided else ()
    verdict = Verdict(Status.ATTRIBUTED if is_decided else Status.INCONCLUSIVE, outliers, ended)
    return _record(evidence, "process", ranks, verdict, suspects, manifestation=Manifestation.CRASH)


def of_coordinates(evidence: Evidence, mesh: Mesh, ranks: Sequence[int]) -> list[EvidenceRecord]:
    """Compare the equivalent peers of ``ranks`` by step * 2**32 + operation."""
    # Limited before peers are looked up: the whole job may be named.
    groups = dict.fromkeys(mesh.peers_of(rank) for rank in ranks[: MOST * MOST])
    records = []
    for group in list(groups)[:MOST]:
        peers = _peers(evidence, group.ranks, ranks)
        if len(peers) > 1:
            verdict = exact([_coordinate(evidence.reports.get(rank)) for rank in peers])
            records.append(_record(evidence, "coordinate", peers, verdict, ranks))
        else:
            reason = f"rank {group.ranks[0]} has no equivalent peer that answered"
            records.append(
                _record(evidence, "coordinate", peers or group.ranks[:1], None, ranks, reason=reason)
            )
    return records


def shown(
    evidence: Evidence, step: int, suspects: Collection[int], proof: Sequence[EvidenceRecord]
) -> list[EvidenceRecord]:
    """Return stacks and open operations of suspects and of a few other ranks, unless the proof shows them."""
    proved = {each.progress["rank"] for each in proof if each.progress is not None}
    reports, suspects = evidence.reports, frozenset(suspects)
    with_stack = [rank for rank in sorted(reports) if reports[rank].stack and rank not in proved]
    stacks = [rank for rank in with_stack if rank in suspects][:_SUSPECTS]
    stacks += [rank for rank in with_stack if rank not in suspects][:_VICTIMS]
    others = (rank for rank in sorted(reports) if rank not in suspects)
    ordered = [rank for rank in sorted(suspects) if rank in reports][: _SUSPECTS + _VICTIMS]
    ordered += [rank for rank, _ in zip(others, range(_SUSPECTS + _VICTIMS - len(ordered)), strict=False)]
    records = []
    for rank in stacks:
        role = "named" if rank in suspects else "not named"
        progress = {"rank": rank, "waiting": reports[rank].waiting, "stack": reports[rank].stack}
        reason = f"the stacks of rank {rank}, which is {role}: shown, not compared"
        records.append(_beside(step, "stack", reason, progress))
    for rank in ordered:
        if (operations := reports[rank].operations) is not None:
            reason = (
                f"operations of rank {rank} that are not over, by the Flight Recorder: shown, not compared"
            )
            records.append(_beside(step, "flight_recorder", reason, {"rank": rank, **operations}))
    return records


def silence(evidence: Evidence, ranks: Iterable[int]) -> float:
    """Return the longest silence among ``ranks``, in seconds."""
    reports = (evidence.reports.get(rank) for rank in ranks)
    found = (
        each.progress.silent_seconds for each in reports if each is not None and each.progress is not None
    )
    return max(found, default=0.0)


def _peers(evidence: Evidence, ranks: Iterable[int], suspects: Collection[int]) -> tuple[int, ...]:
    # A rank that did not answer has no evidence to compare; a suspect is shown nevertheless.
    named = set(suspects)
    return tuple(rank for rank in ranks if rank in evidence.reports or rank in named)


def _entered(evidence: Evidence, rank: int, key: str) -> int | None:
    report = evidence.reports.get(rank)
    return None if report is None or report.progress is None else report.progress.entered.get(key)


def _coordinate(report: RankReport | None) -> int:
    progress = None if report is None else report.progress
    return -1 if progress is None else (progress.step << 32) + progress.operation


def _record(
    evidence: Evidence,
    surface: Surface,
    peers: tuple[int, ...],
    verdict: Verdict | None,
    suspects: Collection[int],
    *,
    reason: str | None = None,
    manifestation: Manifestation = Manifestation.HANG,
) -> EvidenceRecord:
    """Return a record with the context of the first suspect among the peers, or of the first peer."""
    named = set(suspects)
    subject = next((rank for rank in peers if rank in named), peers[0])
    reports = (evidence.reports.get(rank) for rank in peers)
    steps = (each.progress.step for each in reports if each is not None and each.progress is not None)
    report = evidence.reports.get(subject)
    recent = () if report is None or report.progress is None else report.progress.recent
    return EvidenceRecord(
        step=max(steps, default=0),
        surface=surface,
        manifestation=manifestation,
        peers=peers,
        verdict=verdict,
        reason=reason,
        progress=_context(evidence, subject),
        fingerprints=tuple(each.text for each in recent if each.group in evidence.groups),
        stall_seconds=silence(evidence, peers),
    )


def _beside(step: int, surface: str, reason: str, progress: dict[str, Any]) -> EvidenceRecord:
    return EvidenceRecord(
        step=step,
        surface=surface,
        manifestation=Manifestation.HANG,
        peers=(progress["rank"],),
        reason=reason,
        progress=progress,
    )


def _context(evidence: Evidence, rank: int) -> dict[str, Any]:
    """What is known about ``rank``, as plain JSON."""
    report = evidence.reports.get(rank)
    if report is None:
        return {"rank": rank, "process": "absent"}
    known: dict[str, Any] = {"rank": rank, "process": report.process.value}
    if report.process is Process.GONE:
        known["ended"] = report.ended
    known |= {"waiting": report.waiting, "stack": report.stack}
    if (progress := report.progress) is not None:
        entered = [key for key in progress.entered if key in evidence.groups][:MOST]
        known |= {
            "step": progress.step,
            "operation": progress.operation,
            "phase": progress.phase.value,
            "at_communication": progress.at_communication,
            "silent_seconds": progress.silent_seconds,
            "device_step": progress.device_step,
            "device_busy": progress.device_busy,
            "entered": {evidence.groups[key].name: progress.entered[key] for key in entered},
        }
    return known


def undecided(record: EvidenceRecord) -> EvidenceRecord:
    """Return the record with an inconclusive verdict."""
    if record.verdict is None:
        return record
    return replace(record, verdict=Verdict(Status.INCONCLUSIVE, (), record.verdict.evidence))
