"""What is said of a hang or a crash, in full sentences (paper, section 7). Nothing is decided here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

from torchscout.decision.divergence import Divergence
from torchscout.decision.hang_graph import Evidence
from torchscout.decision.progress import IssuedOp, Phase, Process, RankReport
from torchscout.mesh import Mesh
from torchscout.utils.text import listed, named, sentences

__all__ = [
    "absent",
    "code_of",
    "crashed",
    "cut_off",
    "deadlock",
    "different",
    "late",
    "lost_machines",
    "stall",
    "unobserved",
]

_DESCRIBED = 2
"""Ranks that are described one by one."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_NOT_THE_USERS = re.compile(r"/(site-packages|dist-packages)/|/lib/python3\.\d+/|^<|/torchscout/")


def code_of(stack: str) -> str:
    """Return ``train.py:77 in load_batch``: the innermost line of the user's own code in the main thread,
    which comes first. Empty if there is none."""
    for file, line, function in _FRAME.findall(stack.partition("\n\n")[0]):
        if not _NOT_THE_USERS.search(file):
            return f"{file.rpartition('/')[2]}:{line} in {function}"
    return ""


def late(evidence: Evidence, mesh: Mesh, missed: Mapping[int, IssuedOp | None], waiters: int) -> str:
    """Describe ranks that others wait for, each with an operation that misses it."""
    described = [_lag(evidence, mesh, rank, missed[rank]) for rank in [*missed][:_DESCRIBED]]
    if len(missed) == 1:
        return sentences(*described, f"{_waiting(waiters)} for it")
    return sentences(f"{named([*missed])} hold up the job", *described, f"{_waiting(waiters)} for them")


def lost_machines(mesh: Mesh, ranks: Sequence[int], waiters: int, elsewhere: int) -> str:
    """Describe machines from which no rank answered; ``elsewhere`` trainers ended because of that."""
    hosts = mesh.hosts_of(ranks)
    machines = f"machine {hosts[0]} is" if len(hosts) == 1 else f"machines {listed(hosts)} are"
    them = "it" if len(ranks) == 1 else "them"
    return sentences(
        f"{machines} unreachable: {named(ranks)} did not answer in two rounds",
        f"{_waiting(waiters)} for {them}" if waiters else "",
        "trainers elsewhere ended because of that" if elsewhere else "",
    )


def crashed(evidence: Evidence, mesh: Mesh, ranks: Sequence[int], others: Sequence[int]) -> str:
    """Describe trainers that ended, and ``others`` that failed because of it."""
    because = f"; {named(others)} failed because of it" if others else ""
    ended = {rank: evidence.reports[rank].ended for rank in ranks}
    if len(ranks) == 1:
        return sentences(
            f"{_rank(mesh, ranks[0])} {ended[ranks[0]]}{_place(evidence.reports[ranks[0]])}{because}"
        )
    if len(set(ended.values())) == 1:
        how = ended[ranks[0]].replace("was ", "were ").replace("has ended", "have ended")
        return sentences(f"{named(ranks, mesh.hosts_of(ranks))} {how} together{because}")
    how = ", ".join(f"rank {rank} {ended[rank]}" for rank in ranks[:_DESCRIBED])
    return sentences(f"{named(ranks)} ended together: {how}{', ...' * (len(ranks) > _DESCRIBED)}{because}")


def different(found: Sequence[Divergence], ranks: Sequence[int], mesh: Mesh) -> str:
    """Describe members of a group that issued different operations; the first of ``found`` in full."""
    first = found[0]
    group, number = first.group.in_words, first.number
    who = _rank(mesh, ranks[0]) if len(ranks) == 1 else named(ranks) if ranks else f"members of {group}"
    theirs = _texts(first, [rank in ranks for rank in first.voters])
    others = _texts(first, [rank not in ranks for rank in first.voters])
    if first.compared == "splits":
        did = f"issued number {number} of {group} with splits that do not match"
    elif first.compared == "digest":
        than = "operations that differ from the other members'" if ranks else "different operations"
        did = f"issued {than} in {group}, before number {number}"
    elif ranks:
        did = f"issued {theirs} as number {number} of {group}, where other members issued {others}"
    else:
        did = f"issued {others} as number {number}"
    more = f"the same happened in {len(found) - 1} more" if len(found) > 1 else ""
    return sentences(f"{who} {did}", more, "" if ranks else "there is no majority to say who is right")


def deadlock(
    evidence: Evidence, mesh: Mesh, cycles: Sequence[Mapping[int, IssuedOp]], guilty: Sequence[int]
) -> str:
    """Describe ranks that wait for each other, with the operation each is in; the first cycle in full."""
    first = cycles[0]
    inside: dict[tuple[str, int], list[int]] = {}
    for rank, issued in first.items():
        inside.setdefault((issued.group, issued.number), []).append(rank)
    shown = listed(f"{named(ranks)} in {_operation(evidence, first[ranks[0]])}" for ranks in inside.values())
    more = f"there are {len(cycles) - 1} more such cycles" if len(cycles) > 1 else ""
    why = "having entered operations in different orders or left one out"
    who = f"{_rank(mesh, guilty[0])} entered what most others have not" if len(guilty) == 1 else ""
    return sentences(f"{named([*first])} wait for each other, {why}: {shown}", more, who)


def stall(
    evidence: Evidence,
    stalled: Sequence[IssuedOp],
    seconds: float,
    unheard: Sequence[int],
    unclear: Sequence[int],
    absent: str,
) -> str:
    """Describe operations that all members have entered, except for ``unheard`` ones; the first in full.
    ``unclear`` members may have left it."""
    group = stalled[0].group
    members, known = evidence.groups[group].members, evidence.answered(group)
    since = f" for {seconds:.1f} s" if seconds else ""  # 0 where it is not known
    rest = len(stalled) - 1
    counted = "1 more operation has" if rest == 1 else f"{rest} more operations have"
    who = f"all {len(members)} members"
    if len(known) < len(members):
        who += f" but {len(members) - len(known)}"
    cause = "no rank is behind: the runtime, a device or the transport has stalled"
    if unclear:
        cause = f"no stack shows whether {named(unclear)} wait there, or are stuck in their own code"
    if unheard:
        suspect = "it" if len(unheard) == 1 else "one of them"
        cause = (
            f"{named(unheard)} {absent}: it is not known whether {suspect}, the runtime, a device or the "
            f"transport has stalled"
        )
    return sentences(
        f"{who} entered {_operation(evidence, stalled[0])}, which has not returned{since}",
        f"{counted} stalled in the same way" if rest else "",
        cause,
    )


def unobserved(
    evidence: Evidence, mesh: Mesh, stuck: Sequence[int], late: Sequence[int], seconds: float
) -> str:
    """Describe devices that do not finish although no operation explains it, and hosts that are behind."""
    states = [f"{_rank(mesh, rank)} is behind; {_state(evidence, rank)}" for rank in late[:_DESCRIBED]]
    return sentences(
        *states,
        f"the device{'s' * (len(stuck) > 1)} of {named(stuck)} did not finish for {seconds:.1f} s",
        f"communication inside CUDA graphs is not observed{'' if late else ', so that nobody can be named'}",
    )


def cut_off(answered: int, size: int) -> str:
    """Describe that too few observers answered to say who is lost."""
    return sentences(
        f"only {answered} of {size} ranks answered", "the others are gone, or these are cut off from them"
    )


def absent(ranks: Sequence[int], did: str, *, may_be_first: bool = False) -> str:
    """Say which ranks did not answer, and perhaps that one of them may have ended first."""
    theirs = "its trainer" if len(ranks) == 1 else "one of their trainers"
    return sentences(f"{named(ranks)} {did}{f': {theirs} may have ended first' if may_be_first else ''}")


def _lag(evidence: Evidence, mesh: Mesh, rank: int, issued: IssuedOp | None) -> str:
    """What a rank has not done, and why."""
    who = _rank(mesh, rank)
    if issued is None:
        return f"{who} is behind; {_state(evidence, rank)}"
    operation = _operation(evidence, issued)
    if evidence.issued(rank, issued.group) < issued.number:
        return f"{who} has not entered {operation}; {_state(evidence, rank)}"
    # It announced the operation: a dead rank may have gone no further, and of a living one only its device.
    progress = None if rank in evidence.dead else evidence.reports[rank].progress
    if progress is None:
        return f"{who} has not finished {operation}; {_state(evidence, rank)}"
    step = f"its device is behind at step {progress.device_step}"
    if issued.group not in progress.entered:
        return f"{who} has not finished {operation}; {step}"
    return f"{who} has issued {operation}, but its device has not reached it; {step}"


def _state(evidence: Evidence, rank: int) -> str:
    report = evidence.reports.get(rank)
    if report is None:
        return "its machine did not answer"
    if report.process is not Process.RUNNING:
        return f"its process {report.ended if report.process is Process.GONE else 'is stopped'}"
    if report.doing:
        return report.doing
    progress = report.progress
    if progress is None:
        return "it has not published any progress"
    doing = "between steps" if progress.phase is Phase.IDLE else f"in {progress.phase.in_words}"
    if report.waiting:
        doing = "waiting for a communication that was not observed"
    at = f", at {code}" if (code := code_of(report.stack)) else ""
    return f"it has been {doing} for {progress.silent_seconds:.1f} s{at}"


def _place(report: RankReport) -> str:
    """Where a trainer was when it ended."""
    progress = report.progress
    if progress is None:
        return " before its first step"
    if progress.phase is Phase.IDLE and progress.step:
        return f" between steps {progress.step} and {progress.step + 1}"
    return f" in step {progress.step + 1} ({progress.phase.in_words})"


def _operation(evidence: Evidence, issued: IssuedOp) -> str:
    return f"{issued.text} number {issued.number} of {evidence.groups[issued.group].in_words}"


def _rank(mesh: Mesh, rank: int) -> str:
    return named((rank,), mesh.hosts_of((rank,)))


def _texts(divergence: Divergence, chosen: Iterable[bool]) -> str:
    return " or ".join([*dict.fromkeys(compress(divergence.texts, chosen))][:3])


def _waiting(count: int) -> str:
    return "1 rank waits" if count == 1 else f"{count} ranks wait"
