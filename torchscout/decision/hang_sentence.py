"""A hang in one sentence for a person (paper, section 7). Words only: nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchscout.decision.progress import Issued, Line, Phase, Process
from torchscout.decision.protocol import Divergence
from torchscout.decision.roll_call import RollCall
from torchscout.mesh import Mesh
from torchscout.utils.text import listed, named

__all__ = ["deadlock", "different", "late", "lost_machines", "stall", "unheard", "unobserved"]

_DOING = {Phase.IDLE: "is between steps"}
_SHOWN = 2
"""Ranks that are described one by one."""


def late(call: RollCall, missed: Mapping[int, Issued], waiters: int) -> str:
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


def deadlock(call: RollCall, cycles: Sequence[Mapping[int, Issued]]) -> str:
    """Ranks that wait for each other, each with the operation it is in; the first cycle in full."""
    first = cycles[0]
    inside: dict[tuple[str, int], list[int]] = {}
    for rank, issued in first.items():
        inside.setdefault((issued.line, issued.number), []).append(rank)
    shown = listed(f"{named(ranks)} in {_operation(call, first[ranks[0]])}" for ranks in inside.values())
    likewise = f"; {len(cycles) - 1} more such cycles" if len(cycles) > 1 else ""
    who = f"{named(tuple(first))} wait for each other"
    return f"{who}, having entered operations in different orders or left one out: {shown}{likewise}"


def stall(call: RollCall, held: Sequence[Issued], seconds: float) -> str:
    """Lines whose members have all entered; the first in full."""
    likewise = f", and likewise in {len(held) - 1} more" if len(held) > 1 else ""
    members = len(call.lines[held[0].line].members)
    entered = f"all {members} members entered {_operation(call, held[0])}"
    since = f" for {seconds:.1f} s" if seconds else ""  # 0 where it is not known
    stalled = f"which has not returned{since}{likewise}"
    return f"{entered}, {stalled}; nobody is behind: the runtime, a device or the transport stalls"


def unobserved(call: RollCall, stuck: Sequence[int], late: Sequence[int]) -> str:
    """Devices that do not finish, although no operation explains it, and whose host is behind, if known."""
    whose = f"the device{'s' if len(stuck) > 1 else ''} of {named(stuck)}"
    devices = f"{whose} did not finish for {call.silence(stuck):.1f} s"
    unseen = "communication inside CUDA graphs is not observed"
    if not late:
        return f"{devices}; {unseen}, so that nobody can be named"
    states = [f"{_rank(call.mesh, rank)} is behind: {_state(call, rank)}" for rank in late[:_SHOWN]]
    return f"{'; '.join([*states, devices])}; {unseen}"


def unheard(call: RollCall, ranks: Sequence[int]) -> str:
    return f" ({named(ranks)} {call.absent})"


def _deed(call: RollCall, rank: int, issued: Issued, comma: str) -> str:
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


def _state(call: RollCall, rank: int) -> str:
    standing, progress = call.standings.get(rank), call.progress(rank)
    if standing is None:
        return f"its machine {call.absent}" if rank in call.lost else f"it {call.absent}"
    if standing.process is not Process.RUNNING:
        return f"its process is {standing.process.value}"
    if standing.doing:
        return standing.doing
    if progress is None:
        return "it has published nothing yet"
    doing = _DOING.get(progress.phase, f"is in {progress.phase.value.replace('_', ' ')}")
    if standing.waiting:
        doing = "waits for a communication that was not observed"
    return f"it {doing} since {progress.silent_seconds:.1f} s"


def _operation(call: RollCall, issued: Issued) -> str:
    return f"{issued.text} number {issued.number} of {_line(call.lines[issued.line])}"


def _line(line: Line) -> str:
    return line.name if line.pair else f"group {line.name}"


def _rank(mesh: Mesh, rank: int) -> str:
    host = mesh.host_of(rank)
    return f"rank {rank}" if host is None else f"rank {rank} on {host}"


def _texts(divergence: Divergence, ranks: Sequence[int]) -> str:
    return " or ".join(list(dict.fromkeys(divergence.issued[rank].text for rank in ranks))[:3])


def _counted(waiters: int) -> str:
    return "1 rank waits" if waiters == 1 else f"{waiters} ranks wait"
