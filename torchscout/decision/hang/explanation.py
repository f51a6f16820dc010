"""The records that prove a hang, and the sentence that describes it (paper, sections 5 and 7). Nothing is
decided here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from torchscout.decision.consensus import Status, Verdict, exact
from torchscout.decision.hang.divergence import Divergence
from torchscout.decision.hang.evidence import NOTHING, Bools, HangEvidence, Ints
from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Process
from torchscout.decision.record import EvidenceRecord, Manifestation, Surface
from torchscout.mesh import Mesh
from torchscout.utils.text import listed, named

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
    "unheard",
    "unobserved",
]

MOST = 8
"""Records of one kind that go with an incident: the hang of a large job touches thousands of lines."""


def of_lines(call: HangEvidence, lines: Iterable[str], suspects: Collection[int]) -> list[EvidenceRecord]:
    """How many operations of each line its members have issued or, where devices enter them, their devices
    have entered; -1 for a suspect that did not answer."""
    records = []
    for key in list(dict.fromkeys(lines))[:MOST]:
        members, reached = call.reached_by(key)
        heard = _heard(call, members, suspects)
        peers = tuple(members[heard].tolist())
        surface = f"{'entered' if call.on_device(key) else 'issued'}/{call.lines[key].name}"
        records.append(_record(call, surface, peers, exact(reached[heard].tolist()), suspects))
    return records


def of_divergence(call: HangEvidence, found: Sequence[Divergence]) -> list[EvidenceRecord]:
    """What members issued as the same number."""
    return [
        _record(call, f"{each.compared}/{each.line.name}", tuple(each.issued), each.verdict, each.ranks)
        for each in found[:MOST]
    ]


def of_cycle(call: HangEvidence, ranks: tuple[int, ...], verdict: Verdict) -> EvidenceRecord:
    """Which operation, numbered as they come, each rank of a cycle is in."""
    return _record(call, "deadlock", ranks, verdict, ranks)


def of_devices(call: HangEvidence, suspects: Sequence[int]) -> EvidenceRecord:
    """Which devices have work left, 1 or 0; nothing else is known of what runs inside CUDA graphs."""
    ranks = np.flatnonzero(call.columns.published & (call.columns.device_busy != NOTHING))
    named = np.isin(ranks, list(suspects))
    busy = tuple(call.columns.device_busy[ranks].tolist())
    is_decided = not all(busy[position] for position in np.flatnonzero(named))
    status = Status.ATTRIBUTED if is_decided else Status.INCONCLUSIVE
    outliers = tuple(np.flatnonzero(named).tolist()) if is_decided else ()
    return _record(call, "device", tuple(ranks.tolist()), Verdict(status, outliers, busy), suspects)


def of_coordinates(call: HangEvidence, ranks: Sequence[int]) -> list[EvidenceRecord]:
    """Where the equivalent peers of ``ranks`` stand: step * 2**32 + operation."""
    # Bounded before peers are looked up: a whole job may be named.
    groups = dict.fromkeys(call.mesh.peers_of(rank) for rank in ranks[: MOST * MOST])
    records = []
    for group in list(groups)[:MOST]:
        members = np.array(group.ranks)
        peers = tuple(members[_heard(call, members, ranks)].tolist())
        if len(peers) > 1:
            verdict = exact([_coordinate(call, rank) for rank in peers])
            records.append(_record(call, "coordinate", peers, verdict, ranks))
        else:
            reason = f"rank {group.ranks[0]} has no equivalent peer that answered"
            records.append(_record(call, "coordinate", peers, None, ranks, reason))
    return records


def _record(
    call: HangEvidence,
    surface: Surface,
    peers: tuple[int, ...],
    verdict: Verdict | None,
    suspects: Collection[int],
    reason: str | None = None,
) -> EvidenceRecord:
    """The context is that of the first suspect among the peers, or of the first peer."""
    named = set(suspects)
    subject = next((rank for rank in peers if rank in named), peers[0])
    return EvidenceRecord(
        step=int(call.columns.step[list(peers)].max()),
        surface=surface,
        manifestation=Manifestation.HANG,
        peers=peers,
        verdict=verdict,
        reason=reason,
        progress=_standing(call, subject),
        fingerprints=tuple(each.text for each in call.recent(subject)),
        stall_seconds=call.silence(peers),
    )


def _few(entered: Mapping[str, int], call: HangEvidence) -> list[tuple[str, int]]:
    return [(key, count) for key, count in entered.items() if key in call.lines][:MOST]


def _heard(call: HangEvidence, ranks: Ints, suspects: Collection[int]) -> Bools:
    # Who did not answer has no evidence to compare; a suspect is shown all the same.
    return call.columns.answered[ranks] | np.isin(ranks, list(suspects))


def _coordinate(call: HangEvidence, rank: int) -> int:
    progress = call.progress(rank)
    return -1 if progress is None else (progress.step << 32) + progress.operation


def _standing(call: HangEvidence, rank: int) -> dict[str, Any]:
    """Where ``rank`` stood, as plain JSON."""
    standing, progress = call.standings.get(rank), call.progress(rank)
    known: dict[str, Any] = {
        "rank": rank,
        "process": "absent" if standing is None else standing.process.value,
    }
    if standing is not None:
        known |= {"waiting": standing.waiting, "stack": standing.stack}
    if progress is not None:
        known |= {
            "step": progress.step,
            "operation": progress.operation,
            "phase": progress.phase.value,
            "at_communication": progress.at_communication,
            "silent_seconds": progress.silent_seconds,
            "device_step": progress.device_step,
            "device_busy": progress.device_busy,
            "entered": {call.lines[key].name: count for key, count in _few(progress.entered, call)},
        }
    return known


_DOING = {Phase.IDLE: "between steps"}
_SHOWN = 2
"""Ranks that are described one by one."""


def late(call: HangEvidence, missed: Mapping[int, IssuedOp], waiters: int) -> str:
    """Ranks that others wait for, each with an operation that misses it."""
    if len(missed) == 1:
        ((rank, issued),) = missed.items()
        return f"{_deed(call, rank, issued, '; ')}; {_counted(waiters)} for it"
    ranks = tuple(missed)
    shown = [_deed(call, rank, missed[rank], ", ") for rank in ranks[:_SHOWN]]
    more = [f"{len(ranks) - _SHOWN} more"] if len(ranks) > _SHOWN else []
    return f"{named(ranks)} hold up the job: {'; '.join([*shown, *more])}; {_counted(waiters)} for them"


def lost_machines(mesh: Mesh, ranks: Sequence[int], waiters: int) -> str:
    """Machines of which nobody answered."""
    hosts = mesh.hosts_of(ranks)
    machines = f"machine {hosts[0]} is" if len(hosts) == 1 else f"machines {listed(hosts)} are"
    return f"{machines} gone: {named(ranks)} did not answer; {_counted(waiters)} for them"


def different(found: Sequence[Divergence], ranks: Sequence[int], mesh: Mesh) -> str:
    """Members of a line that issued something else, the first of ``found`` in full."""
    first = found[0]
    line, number = _line(first.line), first.number
    who = _rank(mesh, ranks[0]) if len(ranks) == 1 else named(ranks) if ranks else f"members of {line}"
    theirs = _texts(first, [rank for rank in first.issued if rank in ranks])
    others = _texts(first, [rank for rank in first.issued if rank not in ranks])
    if first.compared == "splits":
        what = f"issued splits as number {number} of {line} that do not fit"
    elif first.compared == "digest":
        than = "the others" if ranks else "each other"
        what = f"issued other operations than {than} on {line}, before its number {number}"
    elif ranks:
        what = f"issued {theirs} as number {number} of {line}, where others issued {others}"
    else:
        what = f"issued {others} as its number {number}"
    likewise = f", and likewise on {len(found) - 1} more" if len(found) > 1 else ""
    return f"{who} {what}{likewise}" + ("" if ranks else "; there is no majority to say who is right")


def deadlock(call: HangEvidence, cycles: Sequence[Mapping[int, IssuedOp]]) -> str:
    """Ranks that wait for each other, each with the operation it is in; the first cycle in full."""
    first = cycles[0]
    inside: dict[tuple[str, int], list[int]] = {}
    for rank, issued in first.items():
        inside.setdefault((issued.line, issued.number), []).append(rank)
    shown = listed(f"{named(ranks)} in {_operation(call, first[ranks[0]])}" for ranks in inside.values())
    likewise = f"; {len(cycles) - 1} more such cycles" if len(cycles) > 1 else ""
    who = f"{named(tuple(first))} wait for each other"
    return f"{who}, having entered operations in different orders or left one out: {shown}{likewise}"


def stall(call: HangEvidence, held: Sequence[IssuedOp], seconds: float) -> str:
    """Lines whose members have all entered; the first in full."""
    likewise = f", and likewise in {len(held) - 1} more" if len(held) > 1 else ""
    members = len(call.lines[held[0].line].members)
    entered = f"all {members} members entered {_operation(call, held[0])}"
    since = f" for {seconds:.1f} s" if seconds else ""  # 0 where it is not known
    stalled = f"which has not returned{since}{likewise}"
    return f"{entered}, {stalled}; nobody is behind: the runtime, a device or the transport stalls"


def unobserved(call: HangEvidence, stuck: Sequence[int], late: Sequence[int]) -> str:
    """Devices that do not finish, although no operation explains it, and whose host is behind, if known."""
    whose = f"the device{'s' if len(stuck) > 1 else ''} of {named(stuck)}"
    devices = f"{whose} did not finish for {call.silence(stuck):.1f} s"
    unseen = "communication inside CUDA graphs is not observed"
    if not late:
        return f"{devices}; {unseen}, so that nobody can be named"
    states = [f"{_rank(call.mesh, rank)} is behind: {_state(call, rank)}" for rank in late[:_SHOWN]]
    return f"{'; '.join([*states, devices])}; {unseen}"


def unheard(call: HangEvidence, ranks: Sequence[int]) -> str:
    return f" ({named(ranks)} {call.absent})"


def _deed(call: HangEvidence, rank: int, issued: IssuedOp, comma: str) -> str:
    who, what = _rank(call.mesh, rank), _operation(call, issued)
    if call.issued(rank, issued.line) < issued.number:
        return f"{who} has not entered {what}{comma}{_state(call, rank)}"
    # It announced the operation: the dead may have gone no further, and of the living only a device.
    progress = None if rank in call.dead else call.progress(rank)
    if progress is None:
        return f"{who} has not finished {what}{comma}{_state(call, rank)}"
    step = f"its device is behind at step {progress.device_step}"
    if call.entered(rank, issued.line) is None:
        return f"{who} has not finished {what}{comma}{step}"
    return f"{who} has issued {what}, but its device has not come to it{comma}{step}"


def _state(call: HangEvidence, rank: int) -> str:
    standing, progress = call.standings.get(rank), call.progress(rank)
    if standing is None:
        return f"its machine {call.absent}" if rank in call.lost else f"it {call.absent}"
    if standing.process is not Process.RUNNING:
        return f"its process is {standing.process.value}"
    if standing.doing:
        return standing.doing
    if progress is None:
        return "it has published nothing yet"
    doing = _DOING.get(progress.phase, f"in {progress.phase.value.replace('_', ' ')}")
    if standing.waiting:
        doing = "waiting for a communication that was not observed"
    return f"it has been {doing} for {progress.silent_seconds:.1f} s"


def _operation(call: HangEvidence, issued: IssuedOp) -> str:
    return f"{issued.text} number {issued.number} of {_line(call.lines[issued.line])}"


def _line(line: CommGroup) -> str:
    return line.name if line.pair else f"group {line.name}"


def _rank(mesh: Mesh, rank: int) -> str:
    host = mesh.host_of(rank)
    return f"rank {rank}" if host is None else f"rank {rank} on {host}"


def _texts(divergence: Divergence, ranks: Sequence[int]) -> str:
    return " or ".join(list(dict.fromkeys(divergence.issued[rank].text for rank in ranks))[:3])


def _counted(waiters: int) -> str:
    return "1 rank waits" if waiters == 1 else f"{waiters} ranks wait"
