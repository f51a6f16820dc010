"""Dumps of the Flight Recorder -> why the job hangs (paper, section 7; ``scout explain``).

The dumps become what observers would have posted, and ``diagnosis`` decides as it does for them. It
knows less here: no stacks, no processes and no silence. That the job hung is for the caller to know: of one
that was dumped while it moved, this tells who was last at that moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchscout.decision.hang.diagnosis import diagnose
from torchscout.decision.hang.flight_recorder import Dump, State
from torchscout.decision.hang.flight_recorder_lines import Operation, Recording, recording
from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Process, Progress, RankStatus
from torchscout.decision.record import Incident
from torchscout.mesh import Mesh
from torchscout.utils.text import named

__all__ = ["Explanation", "Progresses", "explain"]

_ABSENT = "left no readable dump"
_STATES = {State.RETIRED: "over"}

# [Note: Devices]
#
# Over NCCL a host issues operations and runs ahead. Where starts are timed, an operation that is merely
# scheduled has not begun on its device: that device waits for something else, or is stuck in another
# kernel, and the others wait for it. So a rank has entered what its device has begun. Where starts are not
# timed, and wherever devices alone explain nothing, it has entered what its host has issued.
#
# [Note: Dumps of different moments]
#
# Ranks are not dumped at the same time. A collective that one member's device has completed was entered
# by all, also by a member whose dump does not show it yet. Gloo does not record whether an operation
# completed or failed: one that is over although a member never issued it has failed, and its rank is
# taken to wait in it.
#
# [Note: Windows]
#
# Ranks show windows of different lengths. Digests, which cover all that went before, begin where all that
# show a line do; before, operations are compared one by one. What went before a window was completed by
# its rank, so it is taken to be what the others show of it.


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the dumps show."""

    recording: Recording
    progresses: Progresses
    incident: Incident | None
    """None where nobody waits."""
    absent: tuple[int, ...]
    """Ranks without a dump."""
    has_hang: bool | None
    """None where that cannot be told."""
    sentence: str


@dataclass(frozen=True, slots=True)
class Progresses:
    """How far each rank is on each line, by its host or by its device."""

    by_device: bool
    entered: Mapping[str, Mapping[int, int]]
    """Line -> rank -> the last number it has entered; ranks with a dump only."""
    waiting: Mapping[str, Mapping[int, int]]
    """Line -> rank -> the first number it has entered and that is not over."""
    shown: Mapping[str, Mapping[int, Sequence[Operation]]]
    """Line -> rank -> operations to compare, on lines that somebody waits on; no completed one
    that misses a member."""
    outdated: frozenset[int]
    """Ranks whose dumps do not show what others have completed with them."""


def explain(dumps: Sequence[Dump], world_size: int) -> Explanation:
    """Why the job of these dumps hangs, if it does."""
    found = recording(dumps, world_size)
    mesh = Mesh.grid(pipeline=world_size)  # who does equal work is not known: nobody has an equivalent peer
    absent = tuple(sorted(set(range(world_size)).difference(found.ranks)))
    attempts = [True, False] if found.times_starts else [False]
    for by_device in attempts:
        progresses = _progresses(found, by_device=by_device)
        standings = _standings(found, progresses)
        incident = diagnose(standings, found.lines, mesh, absent=_ABSENT)
        if incident is not None and set(absent).issuperset(incident.ranks) and 2 * len(absent) > world_size:
            return Explanation(found, progresses, None, absent, None, _too_few(progresses, absent))
        if incident is not None:
            return Explanation(found, progresses, incident, absent, True, incident.sentence)
    has_hang = None if absent or not any(found.operations.values()) else False
    return Explanation(found, progresses, None, absent, has_hang, _without_incident(found, absent))


def _too_few(progresses: Progresses, absent: Sequence[int]) -> str:
    """Most files are missing, rather than most ranks."""
    waiting = sorted({rank for ranks in progresses.waiting.values() for rank in ranks})
    who = f"{named(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    return f"{who} for others, but {named(absent)} {_ABSENT}: it cannot be told which of them is missing"


def _without_incident(found: Recording, absent: Sequence[int]) -> str:
    if not any(found.operations.values()):
        return "the dumps show no operation at all: nothing can be said"
    nothing = "no operation that the dumps show is waiting for anybody"
    if not absent:
        return f"{nothing}: they show no hang"
    return f"{nothing}, but {named(absent)} {_ABSENT}, and may have ended early"


def _progresses(found: Recording, *, by_device: bool) -> Progresses:
    entered: dict[str, dict[int, int]] = {}
    waiting: dict[str, dict[int, int]] = {}
    shown: dict[str, dict[int, list[Operation]]] = {}
    outdated: set[int] = set()
    for key, line in found.lines.items():
        begun = {
            rank: [each for _, each in sorted(found.of(key, rank).items()) if _is_entered(each, by_device)]
            for rank in line.members
            if rank in set(found.ranks)
        }
        entered[key] = _entered(found, key, begun)
        outdated |= {
            rank
            for rank, number in entered[key].items()
            if number > max(found.of(key, rank), default=found.enqueued.get((key, rank), 0))
        }
        least = min(entered[key].values(), default=0)
        first = {
            rank: next((each.number for each in theirs if not _is_over(each, least)), None)
            for rank, theirs in begun.items()
        }
        waiting[key] = {rank: number for rank, number in first.items() if number is not None}
        # Beyond what anybody waits in first, operations are only queued; where nobody waits, all is over.
        last = max(waiting[key].values(), default=0)
        shown[key] = {
            rank: [
                each
                for each in theirs
                if each.number <= last and not (each.number > least and _is_over(each, least))
            ]
            for rank, theirs in begun.items()
        }
    return Progresses(by_device, entered, waiting, shown, frozenset(outdated))


def _is_entered(operation: Operation, by_device: bool) -> bool:
    """See [Note: Devices]."""
    return not by_device or operation.entry.backend == "gloo" or operation.state is not State.SCHEDULED


def _is_over(operation: Operation, least: int) -> bool:
    """See [Note: Dumps of different moments]; ``least`` is what all members have entered."""
    if operation.state is State.RETIRED:
        return operation.number <= least
    return operation.state is State.COMPLETED


def _entered(found: Recording, key: str, begun: Mapping[int, Sequence[Operation]]) -> dict[int, int]:
    by_all = max(
        (
            each.number
            for theirs in begun.values()
            for each in theirs
            if each.state is State.COMPLETED and each.needs_all
        ),
        default=0,
    )
    return {
        rank: max(theirs[-1].number if theirs else 0, found.enqueued.get((key, rank), 0), by_all)
        for rank, theirs in begun.items()
    }


def _standings(found: Recording, progresses: Progresses) -> list[RankStatus]:
    recent: dict[int, list[tuple[int, IssuedOp]]] = defaultdict(list)
    for key, theirs in progresses.shown.items():
        for rank, issued in _issued(key, theirs, progresses.entered[key]).items():
            recent[rank] += issued
    waiting = {rank for ranks in progresses.waiting.values() for rank in ranks}
    standings = []
    for rank in found.ranks:
        ordered = [issued for _, issued in sorted(recent[rank], key=lambda each: each[0])]
        last = found.last(rank)
        progress = Progress(
            rank=rank,
            step=0,
            operation=0 if last is None else last[1].entry.record + 1,
            phase=Phase.IDLE,
            issued={line: ranks[rank] for line, ranks in progresses.entered.items() if rank in ranks},
            recent=tuple(ordered),
            at_communication=rank in waiting,
            silent_seconds=0.0,
        )
        doing = _doing(found, progresses, rank)
        standings.append(RankStatus(rank, Process.RUNNING, progress, rank in waiting, doing=doing))
    return standings


def _issued(
    key: str, shown: Mapping[int, Sequence[Operation]], entered: Mapping[int, int]
) -> dict[int, list[tuple[int, IssuedOp]]]:
    """What each rank shows of a line, with its place in the dump; see [Note: Windows]."""
    start = max((theirs[0].number for theirs in shown.values() if theirs), default=1)
    digests: dict[tuple[int, int], int] = {}
    shared: dict[tuple[int, int], IssuedOp] = {}
    found: dict[int, list[tuple[int, IssuedOp]]] = {}
    for rank, theirs in shown.items():
        found[rank], digest = [], -1
        for each in theirs:
            before = digest if each.number >= start else -1 - each.number
            digest = digests.setdefault((before, each.fingerprint), len(digests))
            issued = IssuedOp(key, each.number, each.fingerprint, digest, each.text)
            found[rank].append((each.entry.record, shared.setdefault((each.number, digest), issued)))
            digest = digest if each.number >= start else -1
    if start == 1 or min(entered.values(), default=0) < start - 1:
        return found
    earlier = (each for (number, _), each in shared.items() if number == start - 1)
    before_all = next(earlier, IssuedOp(key, start - 1, -1, -1, "an earlier operation"))
    for theirs_issued in found.values():
        if theirs_issued and theirs_issued[0][1].number == start:
            theirs_issued.insert(0, (-1, before_all))
    return found


def _doing(found: Recording, progresses: Progresses, rank: int) -> str:
    """What a rank that others wait for was last seen doing."""
    last = found.last(rank)
    if last is None:
        return "its dump shows no operation"
    line, operation = last
    what = f"{operation.text} number {operation.number} of {group_in_words(found.lines[line])}"
    if not _is_entered(operation, progresses.by_device):
        return f"its host has issued {what}, which its device has not begun"
    return f"its last operation is {what}, which is {_STATES.get(operation.state, operation.state.value)}"


def group_in_words(line: CommGroup) -> str:
    return line.name if line.pair else f"group {line.name}"
