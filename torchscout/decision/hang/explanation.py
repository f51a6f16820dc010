"""The records that prove a hang, and the sentences that describe it (paper, sections 5 and 7).

Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np

from torchscout.decision.consensus import Status, Verdict, exact
from torchscout.decision.hang.divergence import Divergence
from torchscout.decision.hang.evidence import HangEvidence
from torchscout.decision.hang.table import NOTHING, Bools, Ints
from torchscout.decision.progress import IssuedOp, Phase, Process
from torchscout.decision.types import EvidenceRecord, Manifestation, Surface
from torchscout.mesh import Mesh
from torchscout.utils.text import listed, named, sentences

__all__ = [
    "MOST",
    "deadlock",
    "different",
    "late",
    "lost_machines",
    "of_coordinates",
    "of_cycle",
    "of_devices",
    "of_divergence",
    "of_lines",
    "stall",
    "unobserved",
]

MOST = 8
"""Records of one kind in an incident, at most: the hang of a large job touches thousands of lines."""


def of_lines(evidence: HangEvidence, lines: Iterable[str], suspects: Collection[int]) -> list[EvidenceRecord]:
    """Compare how many operations of each line its members have issued, or their devices have entered.

    A suspect that did not answer counts as -1.
    """
    records = []
    for key in list(dict.fromkeys(lines))[:MOST]:
        members, reached = evidence.reached_by(key)
        shown = _shown(evidence, members, suspects)
        peers = tuple(members[shown].tolist())
        surface = f"{'entered' if evidence.on_device(key) else 'issued'}/{evidence.lines[key].name}"
        records.append(_record(evidence, surface, peers, exact(reached[shown].tolist()), suspects))
    return records


def of_divergence(evidence: HangEvidence, found: Sequence[Divergence]) -> list[EvidenceRecord]:
    """Compare what members issued as the same number."""
    return [
        _record(evidence, f"{each.compared}/{each.line.name}", each.voters, each.verdict, each.ranks)
        for each in found[:MOST]
    ]


def of_cycle(evidence: HangEvidence, ranks: tuple[int, ...], verdict: Verdict) -> EvidenceRecord:
    """Show which operation each rank of a cycle is in; operations are numbered in order of appearance."""
    return _record(evidence, "deadlock", ranks, verdict, ranks)


def of_devices(evidence: HangEvidence, suspects: Sequence[int]) -> EvidenceRecord:
    """Show which devices have work left (1 or 0): all that is known about the inside of CUDA graphs."""
    ranks = np.flatnonzero(evidence.columns.published & (evidence.columns.device_busy != NOTHING))
    named = np.isin(ranks, list(suspects))
    busy = tuple(evidence.columns.device_busy[ranks].tolist())
    is_decided = not all(busy[position] for position in np.flatnonzero(named))
    status = Status.ATTRIBUTED if is_decided else Status.INCONCLUSIVE
    outliers = tuple(np.flatnonzero(named).tolist()) if is_decided else ()
    return _record(evidence, "device", tuple(ranks.tolist()), Verdict(status, outliers, busy), suspects)


def of_coordinates(evidence: HangEvidence, ranks: Sequence[int]) -> list[EvidenceRecord]:
    """Compare the equivalent peers of ``ranks`` by step * 2**32 + operation."""
    # Limited before peers are looked up: the whole job may be named.
    groups = dict.fromkeys(evidence.mesh.peers_of(rank) for rank in ranks[: MOST * MOST])
    records = []
    for group in list(groups)[:MOST]:
        members = np.array(group.ranks)
        shown = _shown(evidence, members, ranks)
        peers = tuple(members[shown].tolist())
        if len(peers) > 1:
            verdict = exact(_coordinates(evidence, members[shown]))
            records.append(_record(evidence, "coordinate", peers, verdict, ranks))
        else:
            reason = f"rank {group.ranks[0]} has no equivalent peer that answered"
            records.append(_record(evidence, "coordinate", peers, None, ranks, reason))
    return records


def _record(
    evidence: HangEvidence,
    surface: Surface,
    peers: tuple[int, ...],
    verdict: Verdict | None,
    suspects: Collection[int],
    reason: str | None = None,
) -> EvidenceRecord:
    """Return a record with the context of the first suspect among the peers, or of the first peer."""
    named = set(suspects)
    subject = next((rank for rank in peers if rank in named), peers[0])
    return EvidenceRecord(
        step=int(evidence.columns.step[list(peers)].max()),
        surface=surface,
        manifestation=Manifestation.HANG,
        peers=peers,
        verdict=verdict,
        reason=reason,
        progress=_context(evidence, subject),
        fingerprints=tuple(each.text for each in evidence.recent(subject)),
        stall_seconds=evidence.silence(peers),
    )


def _shown(evidence: HangEvidence, ranks: Ints, suspects: Collection[int]) -> Bools:
    # A rank that did not answer has no evidence to compare; a suspect is shown nevertheless.
    return evidence.columns.answered[ranks] | np.isin(ranks, list(suspects))


def _coordinates(evidence: HangEvidence, ranks: Ints) -> list[int]:
    columns = evidence.columns
    coordinates = (columns.step[ranks] << 32) + columns.operation[ranks]
    found: list[int] = np.where(columns.published[ranks], coordinates, -1).tolist()
    return found


def _context(evidence: HangEvidence, rank: int) -> dict[str, Any]:
    """What is known about ``rank``, as plain JSON."""
    status, progress = evidence.statuses.get(rank), evidence.progress(rank)
    known: dict[str, Any] = {
        "rank": rank,
        "process": "absent" if status is None else status.process.value,
    }
    if status is not None:
        known |= {"waiting": status.waiting, "stack": status.stack}
    if progress is not None:
        entered = [key for key in progress.entered if key in evidence.lines][:MOST]
        known |= {
            "step": progress.step,
            "operation": progress.operation,
            "phase": progress.phase.value,
            "at_communication": progress.at_communication,
            "silent_seconds": progress.silent_seconds,
            "device_step": progress.device_step,
            "device_busy": progress.device_busy,
            "entered": {evidence.lines[key].name: progress.entered[key] for key in entered},
        }
    return known


_DESCRIBED = 2
"""Ranks that are described one by one."""


def late(evidence: HangEvidence, missed: Mapping[int, IssuedOp], waiters: int) -> str:
    """Describe ranks that others wait for, each with an operation that misses it."""
    described = [_lag(evidence, rank, missed[rank]) for rank in list(missed)[:_DESCRIBED]]
    if len(missed) == 1:
        return sentences(*described, f"{_counted(waiters)} for it")
    return sentences(f"{named(tuple(missed))} hold up the job", *described, f"{_counted(waiters)} for them")


def lost_machines(mesh: Mesh, ranks: Sequence[int], waiters: int) -> str:
    """Describe machines from which no rank answered."""
    hosts = mesh.hosts_of(ranks)
    machines = f"machine {hosts[0]} is" if len(hosts) == 1 else f"machines {listed(hosts)} are"
    return sentences(f"{machines} gone: {named(ranks)} did not answer", f"{_counted(waiters)} for them")


def different(found: Sequence[Divergence], ranks: Sequence[int], mesh: Mesh) -> str:
    """Describe members of a line that issued different operations; the first of ``found`` in full."""
    first = found[0]
    line, number = first.line.in_words, first.number
    who = _rank(mesh, ranks[0]) if len(ranks) == 1 else named(ranks) if ranks else f"members of {line}"
    named_ranks = set(ranks)
    theirs = _texts(first, [rank in named_ranks for rank in first.voters])
    others = _texts(first, [rank not in named_ranks for rank in first.voters])
    if first.compared == "splits":
        did = f"issued number {number} of {line} with splits that do not match"
    elif first.compared == "digest":
        than = "operations that differ from the other members'" if ranks else "different operations"
        did = f"issued {than} on {line}, before number {number}"
    elif ranks:
        did = f"issued {theirs} as number {number} of {line}, where other members issued {others}"
    else:
        did = f"issued {others} as number {number}"
    more = f"the same happened on {len(found) - 1} more" if len(found) > 1 else ""
    return sentences(f"{who} {did}", more, "" if ranks else "there is no majority to say who is right")


def deadlock(evidence: HangEvidence, cycles: Sequence[Mapping[int, IssuedOp]]) -> str:
    """Describe ranks that wait for each other, with the operation each is in; the first cycle in full."""
    first = cycles[0]
    inside: dict[tuple[str, int], list[int]] = {}
    for rank, issued in first.items():
        inside.setdefault((issued.line, issued.number), []).append(rank)
    shown = listed(f"{named(ranks)} in {_operation(evidence, first[ranks[0]])}" for ranks in inside.values())
    more = f"there are {len(cycles) - 1} more such cycles" if len(cycles) > 1 else ""
    why = "having entered operations in different orders or left one out"
    return sentences(f"{named(tuple(first))} wait for each other, {why}: {shown}", more)


def stall(
    evidence: HangEvidence, stalled: Sequence[IssuedOp], seconds: float, absent: Sequence[int] = ()
) -> str:
    """Describe operations that all members have entered, except for absent ones; the first in full."""
    members = len(evidence.lines[stalled[0].line].members)
    since = f" for {seconds:.1f} s" if seconds else ""  # 0 where it is not known
    rest = len(stalled) - 1
    counted = "1 more operation has" if rest == 1 else f"{rest} more operations have"
    more = f"{counted} stalled in the same way" if rest else ""
    who, cause = (
        f"all {members} members",
        "no rank is behind: the runtime, a device or the transport has stalled",
    )
    if absent:
        unknown = members - evidence.answered[evidence.lines.index(stalled[0].line)]
        who = f"all {members} members{f' but {unknown}' if unknown else ''}"
        suspect = "it" if len(absent) == 1 else "one of them"
        cause = (
            f"{named(absent)} {evidence.absent}: it is not known whether "
            f"{suspect}, the runtime, a device or the transport has stalled"
        )
    return sentences(
        f"{who} entered {_operation(evidence, stalled[0])}, which has not returned{since}",
        more,
        cause,
    )


def unobserved(evidence: HangEvidence, stuck: Sequence[int], late: Sequence[int]) -> str:
    """Describe devices that do not finish although no operation explains it, and hosts that are behind."""
    states = [
        f"{_rank(evidence.mesh, rank)} is behind; {_state(evidence, rank)}" for rank in late[:_DESCRIBED]
    ]
    devices = f"the device{'s' * (len(stuck) > 1)} of {named(stuck)}"
    return sentences(
        *states,
        f"{devices} did not finish for {evidence.silence(stuck):.1f} s",
        f"communication inside CUDA graphs is not observed{'' if late else ', so that nobody can be named'}",
    )


def _lag(evidence: HangEvidence, rank: int, issued: IssuedOp) -> str:
    """What a rank has not done, and why."""
    who, operation = _rank(evidence.mesh, rank), _operation(evidence, issued)
    if evidence.issued(rank, issued.line) < issued.number:
        return f"{who} has not entered {operation}; {_state(evidence, rank)}"
    # It announced the operation: a dead rank may have gone no further, and of a living one only its device.
    progress = None if rank in evidence.dead else evidence.progress(rank)
    if progress is None:
        return f"{who} has not finished {operation}; {_state(evidence, rank)}"
    step = f"its device is behind at step {progress.device_step}"
    if evidence.entered(rank, issued.line) is None:
        return f"{who} has not finished {operation}; {step}"
    return f"{who} has issued {operation}, but its device has not reached it; {step}"


def _state(evidence: HangEvidence, rank: int) -> str:
    status, progress = evidence.statuses.get(rank), evidence.progress(rank)
    if status is None:
        return f"its machine {evidence.absent}"  # a rank that is absent alone is not described
    if status.process is not Process.RUNNING:
        return f"its process is {status.process.value}"
    if status.doing:
        return status.doing
    if progress is None:
        return "it has not published any progress"
    doing = "between steps" if progress.phase is Phase.IDLE else f"in {progress.phase.in_words}"
    if status.waiting:
        doing = "waiting for a communication that was not observed"
    return f"it has been {doing} for {progress.silent_seconds:.1f} s"


def _operation(evidence: HangEvidence, issued: IssuedOp) -> str:
    return f"{issued.text} number {issued.number} of {evidence.lines[issued.line].in_words}"


def _rank(mesh: Mesh, rank: int) -> str:
    return named((rank,), mesh.hosts_of((rank,)))


def _texts(divergence: Divergence, chosen: Sequence[bool]) -> str:
    return " or ".join(list(dict.fromkeys(compress(divergence.texts, chosen)))[:3])


def _counted(waiters: int) -> str:
    return "1 rank waits" if waiters == 1 else f"{waiters} ranks wait"
