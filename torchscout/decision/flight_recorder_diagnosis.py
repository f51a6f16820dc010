"""Explains a hang from dumps of the Flight Recorder (paper, section 7; ``scout explain``).

Dumps are converted to what observers would have reported, and ``diagnosis`` decides as for observers. It has
less evidence here: no stacks, no process states and no silence. The caller must know that the job hung: for
dumps of a job that was moving, the result is the rank that was last at that moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchscout.decision.flight_recorder import Dump, State
from torchscout.decision.flight_recorder_lines import Operation, Recording, recording
from torchscout.decision.hang.diagnosis import diagnose
from torchscout.decision.progress import IssuedOp, Phase, Process, Progress, RankStatus
from torchscout.decision.types import Incident, Scope
from torchscout.mesh import Mesh
from torchscout.utils.text import named, sentences

__all__ = ["Explanation", "Progresses", "explain"]

_ABSENT = "left no readable dump"

# [Note: Devices]
#
# Over NCCL a host issues operations and runs ahead. If starts are timed, an operation that is only scheduled
# has not begun on its device: the device waits for something else, or is stuck in another kernel, and the
# other members wait for it. So a rank has entered what its device has begun. If starts are not timed, or if
# devices alone explain nothing, a rank has entered what its host has issued.
#
# [Note: Dumps of different moments]
#
# Ranks are not dumped at the same time. If the device of one member has completed a collective, all members
# have entered it, including those whose dump does not show it yet. Gloo does not record whether an operation
# completed or failed: one that is over although a member never issued it has failed, and its rank counts as
# waiting in it.
#
# [Note: Windows]
#
# Ranks show windows of different lengths. Digests, which cover everything before, begin where the windows of
# all ranks do; earlier operations are compared one by one. A rank has completed what came before its window,
# so that is assumed to equal what other ranks show of it.


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the dumps show."""

    recording: Recording
    progresses: Progresses
    incident: Incident | None
    """None if no rank waits."""
    absent: tuple[int, ...]
    """Ranks without a dump."""
    has_hang: bool | None
    """None if unknown."""
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
    """Line -> rank -> operations to compare, on lines with a waiting rank; without completed operations that
    miss a member."""
    outdated: frozenset[int]
    """Ranks whose dumps do not show what others have completed with them."""


def explain(dumps: Sequence[Dump], world_size: int) -> Explanation:
    """Explain why the job hangs, if it does. Raises ``ValueError`` for dumps that cannot be of one job."""
    found = recording(dumps, world_size)
    mesh = Mesh.grid(pipeline=world_size)  # peers are unknown
    absent = tuple(sorted(set(range(world_size)).difference(found.ranks)))
    attempts = [True, False] if found.times_starts else [False]
    for by_device in attempts:
        progresses = _progresses(found, by_device=by_device)
        incident = diagnose(_statuses(found, progresses), found.lines, mesh, absent=_ABSENT)
        if incident is not None and _is_about_absence(incident, absent) and 2 * len(absent) > world_size:
            return Explanation(found, progresses, None, absent, None, _too_few(progresses, absent))
        if incident is not None:
            return Explanation(found, progresses, incident, absent, True, incident.sentence)
    has_hang = None if absent or not any(found.operations.values()) else False
    return Explanation(found, progresses, None, absent, has_hang, _without_incident(found, absent))


def _is_about_absence(incident: Incident, absent: Sequence[int]) -> bool:
    """Whether it is a group that waits, with absent members."""
    is_stall = incident.scope is Scope.PROCESS_GROUP and incident.records[0].surface.startswith("issued/")
    return is_stall and not set(incident.ranks).isdisjoint(absent)


def _too_few(progresses: Progresses, absent: Sequence[int]) -> str:
    """Assume that files are missing, rather than ranks."""
    waiting = sorted({rank for ranks in progresses.waiting.values() for rank in ranks})
    wait = f"{named(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for other ranks"
    return sentences(f"{wait}, but {named(absent)} {_ABSENT}, so the missing rank cannot be identified")


def _without_incident(found: Recording, absent: Sequence[int]) -> str:
    if not any(found.operations.values()):
        return "The dumps contain no operations."
    if not absent:
        return "The dumps show no hang: no operation waits for a rank."
    return sentences(f"no operation waits for a rank, but {named(absent)} {_ABSENT} and may have ended early")


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
        # Later operations are only queued; if no rank waits, all operations are over.
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
    """See [Note: Dumps of different moments]; all members have entered the first ``least`` operations."""
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


def _statuses(found: Recording, progresses: Progresses) -> list[RankStatus]:
    recent: dict[int, list[tuple[int, IssuedOp]]] = defaultdict(list)
    for key, theirs in progresses.shown.items():
        for rank, issued in _issued(key, theirs, progresses.entered[key]).items():
            recent[rank] += issued
    waiting = {rank for ranks in progresses.waiting.values() for rank in ranks}
    statuses = []
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
        statuses.append(RankStatus(rank, Process.RUNNING, progress, rank in waiting, doing=doing))
    return statuses


def _issued(
    key: str, shown: Mapping[int, Sequence[Operation]], entered: Mapping[int, int]
) -> dict[int, list[tuple[int, IssuedOp]]]:
    """Return the operations of a line for each rank, with their place in the dump; see [Note: Windows]."""
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
    """Describe the last operation of a rank."""
    last = found.last(rank)
    if last is None:
        return "its dump contains no operations"
    line, operation = last
    title = f"{operation.text} number {operation.number} of {found.lines[line].in_words}"
    if not _is_entered(operation, progresses.by_device):
        return f"its host has issued {title}, which its device has not begun"
    state = "over" if operation.state is State.RETIRED else operation.state.value
    return f"its last operation is {title}, which is {state}"
