"""Explains a hang from dumps of PyTorch's Flight Recorder (paper, section 7; ``scout explain``).

A dump is a dictionary, as ``torch._C._distributed_c10d._dump_nccl_trace`` and ``_dump_fr_trace`` pickle it
and their ``_json`` forms write it. Its keys differ between releases, and a file may be damaged, so entries
that are not as expected are left out and counted. The dumps of all ranks become the reports of one round, and
``diagnose`` decides. There are no stacks, process states and silences in dumps: the caller must know that the
job hung. For a job that was moving, the result is the rank that was last at that moment.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torchscout.decision.hang import Round, diagnose
from torchscout.decision.progress import CommGroup, IssuedOp, Phase, Progress, RankReport, Window
from torchscout.decision.types import Incident
from torchscout.mesh import Mesh
from torchscout.utils.text import named, sentences

__all__ = ["Dump", "Entry", "Explanation", "Recording", "State", "explain", "read_dump"]

_WORLD = "default_pg"
"""PyTorch's description of the group of all ranks."""
_ABSENT = "left no readable dump"
_MOST_ENTRIES = 1_000_000
_MOST_FRAMES = 32
_MOST_TENSORS = 10_000
_MOST_AXES = 64
_MOST_CHARACTERS = 500
_SHOWN_SHAPES = 2
_DTYPES = {"Half": "float16", "Float": "float32", "Double": "float64", "Int": "int32", "Long": "int64"}
_SAME_AS = {"_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}
"""Different calls of the same operation."""
_BY_OUTPUT = ("all_gather", "ALLGATHER", "scatter", "recv")
"""Operations whose callers agree on the size of the output. For all others it is the size of the input."""
_WITHOUT_SIZE = ("all_to_all", "barrier", "coalesced")
_ENDS_EARLY = ("broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "gather", "scatter")
"""Collectives that a member may complete before all members have issued them."""
_PAIR = re.compile(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9})")


class State(str, Enum):
    """The state of an operation when the dump was made."""

    SCHEDULED = "scheduled"
    """Issued by the host."""
    STARTED = "started"
    """Begun on the device. Recorded only where collectives are timed (``TORCH_NCCL_ENABLE_TIMING=1``)."""
    COMPLETED = "completed"
    RETIRED = "retired"
    """Completed or failed; Gloo does not record which."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation that a rank has issued, or several that were launched together."""

    record: int
    """Its index among all operations of the rank."""
    group: tuple[str, str]
    """Name and description of the process group."""
    operation: str
    """``all_reduce``, ``send``, ...; ``coalesced`` for the launch of the operations recorded before it."""
    is_transfer: bool
    """A send or a receive, or the launch of several."""
    ends: tuple[int, int] | None
    """Source and destination of a send or receive, as positions in the group."""
    sequence: int
    """From 1, its number among the collectives of the group or among the transfers of the rank there;
    operations that are launched together share one."""
    agreed: Hashable
    """What all callers must have in common: the operation, its dtypes and the number of elements."""
    text: str
    """For display: ``all_reduce float32[1024]``."""
    state: State
    is_on_device: bool
    """Whether a device runs it; false for Gloo."""
    was_started: bool
    """Whether the time of its start was recorded."""
    created: int
    """When it was issued, in nanoseconds since the epoch; 0 if not recorded."""
    frames: tuple[str, ...]
    """The Python stack that issued it, innermost first."""

    @property
    def launch(self) -> tuple[object, ...]:
        """Equal for operations that were launched together."""
        return self.group, self.is_transfer, self.sequence


@dataclass(frozen=True, slots=True)
class Dump:
    """The dump of one rank."""

    rank: int
    entries: tuple[Entry, ...]
    """Oldest first."""
    groups: Mapping[str, tuple[int, ...]]
    """Name -> global ranks, for groups whose members were recorded. Gloo records none."""
    world_size: int | None
    """The size of the group of all ranks, if it was recorded."""
    unreadable: int
    """Entries that could not be read."""
    has_lost_entries: bool
    """Whether older operations are missing: the buffer was full, or only open ones were dumped."""


def read_dump(rank: int, document: object) -> Dump:
    """Read the dump of ``rank``; raises ``ValueError`` if ``document`` is not a dump."""
    if not isinstance(document, Mapping):
        raise ValueError(f"a dump is a dictionary, not a {type(document).__name__}")
    if not {"entries", "pg_config", "pg_status"} & document.keys():
        raise ValueError("not a dump of the Flight Recorder: it has neither entries nor pg_config")
    raw = document.get("entries", [])  # missing if there are none
    if not isinstance(raw, list | tuple):
        raise ValueError(f"entries must be a list, not a {type(raw).__name__}")
    if len(raw) > _MOST_ENTRIES:
        raise ValueError(f"a dump may have {_MOST_ENTRIES:,} entries at most, not {len(raw):,}")
    entries = [entry for each in raw if (entry := _readable(each)) is not None]
    if raw and not entries:
        raise ValueError(f"none of its {len(raw)} entries can be read")
    entries.sort(key=lambda entry: entry.record)
    has_lost = [entry.record for entry in entries] != list(range(len(entries)))
    config = document.get("pg_config")
    groups, world_size = dict[str, tuple[int, ...]](), None
    for name, each in config.items() if isinstance(config, Mapping) else ():
        if isinstance(name, str) and isinstance(each, Mapping) and (members := _members(each.get("ranks"))):
            groups[_words(name)] = members
            world_size = len(members) if each.get("desc") == _WORLD else world_size
    unreadable = len(raw) - len(entries)
    if has_lost and all(entry.state in (State.SCHEDULED, State.STARTED) for entry in entries):
        entries = _without_launched(entries)
    return Dump(rank, tuple(entries), groups, world_size, unreadable, has_lost)


def _without_launched(entries: Sequence[Entry]) -> list[Entry]:
    """Leave out parts of launches that a dump of open operations lacks, because they have completed: only the
    launch, which is the entry after them, has their state."""
    launches = {entry.launch for entry in entries if entry.operation == "coalesced"}
    count = Counter(entry.launch for entry in entries)

    def may_be_over(entry: Entry) -> bool:
        is_part = entry.is_transfer or count[entry.launch] > 1
        return is_part and entry.launch not in launches and entry.state is State.SCHEDULED

    return [entry for entry in entries if not may_be_over(entry)]


def _readable(raw: Any) -> Entry | None:
    try:
        return _entry(raw)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def _entry(raw: Mapping[str, Any]) -> Entry:
    backend, _, title = _words(raw["profiling_name"]).rpartition(":")
    name = title.split(" ")[0]
    operation = _SAME_AS.get(name, name)
    group, description = raw["process_group"]
    description = _words(description) if isinstance(description, str) and description != "undefined" else ""
    pair, ends = _PAIR.fullmatch(title), None
    if pair is not None:
        ends = (int(pair[2]), int(pair[4])) if pair[1] == "send" else (int(pair[4]), int(pair[2]))
    is_transfer = ends is not None or bool(raw.get("is_p2p", False))
    collective = _whole(raw["collective_seq_id"] if "collective_seq_id" in raw else raw["seq_id"], 1 << 31)
    side = "output" if operation.startswith(_BY_OUTPUT) else "input"
    tensors = (raw.get(f"{side}_sizes") or ())[:_MOST_TENSORS]
    shapes = [[_whole(size) for size in shape[:_MOST_AXES]] for shape in tensors]
    dtypes = [_words(each) for each in (raw.get(f"{side}_dtypes") or ())[:_MOST_TENSORS]]
    elements = () if operation.startswith(_WITHOUT_SIZE) else (sum(map(math.prod, shapes)),)
    state = State(raw["state"])
    if backend == "gloo" and raw.get("retired") is True:  # Gloo leaves the state at "scheduled"
        state = State.RETIRED
    return Entry(
        record=_whole(raw["record_id"], 1 << 31),
        group=(_words(group), description),
        operation=operation,
        is_transfer=is_transfer,
        ends=ends,
        sequence=_whole(raw.get("p2p_seq_id", 0), 1 << 31) if is_transfer else collective,
        agreed=("transfer" if ends else operation, *sorted(set(dtypes)), *elements),
        text=_text(operation, dtypes, shapes),
        state=state,
        is_on_device=backend != "gloo",
        was_started=bool(raw.get("time_discovered_started_ns")),
        created=_whole(raw.get("time_created_ns", 0)),
        frames=tuple(
            f"{_words(each['filename'])}:{_whole(each['line'])} {_words(each['name'])}"
            for each in raw.get("frames", ())[:_MOST_FRAMES]
        ),
    )


def _text(operation: str, dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    dtype = ", ".join(dict.fromkeys(_DTYPES.get(each, each.lower()) for each in dtypes[:_SHOWN_SHAPES]))
    shown = "".join(f"[{','.join(map(str, shape))}]" for shape in shapes[:_SHOWN_SHAPES])
    more = f" and {len(shapes) - _SHOWN_SHAPES} more" if len(shapes) > _SHOWN_SHAPES else ""
    return " ".join(filter(None, (operation, dtype + shown + more)))


def _members(raw: object) -> tuple[int, ...]:
    """Read the ranks of a group, which are usually text: ``[0, 1, 2]``."""
    if isinstance(raw, str) and re.fullmatch(r"[\[\]0-9, ]*", raw):
        return tuple(int(each) for each in re.findall(r"\d{1,9}", raw))
    if isinstance(raw, list | tuple) and all(isinstance(each, int) and 0 <= each < 1 << 31 for each in raw):
        return tuple(raw)
    return ()


def _whole(raw: object, most: int = 1 << 63) -> int:
    if not isinstance(raw, int) or not 0 <= raw < most:
        raise ValueError("not a whole number, or too large")  # the value may be a structure of any size
    return raw


def _words(raw: object) -> str:
    """Return text that is safe to print on a terminal."""
    if not isinstance(raw, str):
        raise TypeError("not text")
    shown = raw[:_MOST_CHARACTERS]
    return shown if shown.isprintable() else "".join(each if each.isprintable() else "?" for each in shown)


class _Codes(dict[Hashable, int]):
    """Numbers from 1, equal for equal values only."""

    def __missing__(self, value: Hashable) -> int:
        return self.setdefault(value, len(self) + 1)


class Recording:
    """The operations in the dumps of all ranks, numbered per group.

    A dump has the number of a collective. A send or receive has no number that both ends share, so transfers
    are counted per direction. If older ones are lost, counting begins with what both ends have completed.
    """

    def __init__(self, dumps: Sequence[Dump], world_size: int) -> None:
        self.dumps = {dump.rank: dump for dump in dumps}
        self.world = tuple(range(world_size))
        lost = {dump.rank for dump in dumps if dump.has_lost_entries}
        self.lost = lost | {dump.rank for dump in dumps if lost and not dump.entries}
        """Ranks that may have issued more than their dumps show."""
        self.groups: dict[str, CommGroup] = {}
        self.guessed: set[str] = set()
        """Groups whose members are not recorded; the ranks that used them are assumed to be their members."""
        self.operations: dict[str, dict[int, dict[int, Entry]]] = {}
        """Group -> rank -> number -> operation, in ascending order."""
        self.last: dict[int, tuple[str, int]] = {}
        """Rank -> group and number of its last operation."""
        on_device = [entry for dump in dumps for entry in dump.entries if entry.is_on_device]
        self.is_on_device = bool(on_device)
        """Whether any operation ran on a device, that is, not over Gloo."""
        completed = [entry.was_started for entry in on_device if entry.state is State.COMPLETED]
        self.has_starts = any(entry.was_started for entry in on_device) and all(completed)
        """Whether the dumps distinguish what a device has begun from what is only issued."""
        self.codes = _Codes()
        self._known: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self._used: dict[tuple[str, str], set[int]] = defaultdict(set)
        for dump in dumps:
            for name, members in dump.groups.items():
                self._known[name].add(members)
            for entry in dump.entries:
                self._used[entry.group].add(dump.rank)
        issued: dict[str, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for dump in dumps:
            for key, entry in self._communicating(dump):
                issued[key][dump.rank].append(entry)
        for key, entries in issued.items():
            self.operations[key] = self._numbered(self.groups[key], entries)
        newest = dict[int, int]()
        for key, operations in self.operations.items():
            for rank, theirs in operations.items():
                number, entry = next(reversed(theirs.items()))
                if entry.record > newest.get(rank, -1):
                    newest[rank], self.last[rank] = entry.record, (key, number)

    def _communicating(self, dump: Dump) -> Iterable[tuple[str, Entry]]:
        """Yield group and operation, each with the state of its launch."""
        launched = {each.launch: each.state for each in dump.entries if each.operation == "coalesced"}
        keys: dict[object, str | None] = {}
        for entry in dump.entries:
            if entry.ends is None and (entry.is_transfer or not entry.sequence):
                continue  # a launch of transfers, or no operation of a group
            if (at := (entry.group, entry.ends)) not in keys:
                keys[at] = self._group(dump, entry)
            if (key := keys[at]) is not None:
                yield key, replace(entry, state=launched.get(entry.launch, entry.state))

    def _group(self, dump: Dump, entry: Entry) -> str | None:
        """Return the key of an operation's group; None for a transfer whose ends are not in the group."""
        members, is_guess = self._members(dump, entry)
        key, name = f"{entry.group}@{members}", entry.group[1] or entry.group[0]
        if len(members) < len(self.world):  # other groups may have the same name
            name += f" of {named(members)}"
        if entry.ends is not None:
            ends = tuple(members[place] for place in entry.ends if place < len(members))
            if len({*ends}) < 2:
                return None
            key, name, members, is_guess = f"{key}/{ends}", f"{ends[0]} -> {ends[1]}", ends, False
        self.groups.setdefault(key, CommGroup(key, members, name, pair=entry.ends is not None))
        if is_guess:
            self.guessed.add(key)
        return key

    def _members(self, dump: Dump, entry: Entry) -> tuple[tuple[int, ...], bool]:
        """Return global ranks, and whether they are guessed."""
        name, description = entry.group
        if own := dump.groups.get(name):
            return own, False
        others = {members for members in self._known[name] if dump.rank in members}
        if len(others) == 1:
            return others.pop(), False
        if description == _WORLD:
            return self.world, False
        used = self._used[entry.group]
        # A group that all ranks with a dump have used probably has all ranks.
        return (self.world if used == self.dumps.keys() else tuple(sorted(used))), True

    def _numbered(self, group: CommGroup, issued: Mapping[int, list[Entry]]) -> dict[int, dict[int, Entry]]:
        over = {
            rank: sum(each.state is State.COMPLETED for each in theirs) for rank, theirs in issued.items()
        }
        is_aligned = not self.lost.isdisjoint(issued)
        found: dict[int, dict[int, Entry]] = {}
        for rank, theirs in issued.items():
            numbered = found[rank] = dict[int, Entry]()
            before = max(over.values()) - over[rank] if is_aligned else 0
            for place, entry in enumerate(theirs, 1):
                number = before + place if group.pair else entry.sequence
                numbered[number] = self._joined(numbered.get(number), entry)
        return found

    def _joined(self, before: Entry | None, entry: Entry) -> Entry:
        """Return operations that were launched together as one."""
        if before is None:
            return entry
        if entry.operation == "coalesced":  # the launch of the entries before it, which have a text
            return replace(before, state=entry.state)
        text = before.text if before.text.endswith(", ...") else f"{before.text}, ..."
        return replace(entry, agreed=self.codes[before.agreed, entry.agreed], text=text)


# [Note: Devices]
#
# Over NCCL a host issues operations and runs ahead. If starts are recorded, an operation that is only
# scheduled has not begun on its device: the device waits for something else, or is stuck in another kernel,
# and the other members wait for it. So a rank has entered what its device has begun. If starts are not
# recorded, or if devices alone explain nothing, a rank has entered what its host has issued.
#
# [Note: Dumps of different moments]
#
# Ranks are not dumped at the same time. If the device of one member has completed a collective, all members
# have entered it, including those whose dump does not show it yet. Gloo does not record whether an operation
# completed or failed: one that is over although a member never issued it has failed, and its rank counts as
# waiting in it.
#
# [Note: Lost entries]
#
# Dumps show windows of different lengths. Operations are compared from where the windows of all ranks have
# begun; what came before is taken to be equal. If a dump has lost entries and shows none of a group in which
# others wait, its rank has not entered that operation, which would be open. Collectives that a member may
# complete before the others are the exception: then nobody knows, and the rank's report is incomplete.


class _View:
    """How far each rank is in each group where somebody waits, by its host or by its device."""

    def __init__(self, found: Recording, *, by_device: bool) -> None:
        self._found, self._by_device = found, by_device
        self.waits: dict[str, dict[int, int]] = {}
        self._entered: dict[int, dict[str, int]] = defaultdict(dict)
        self._recent: dict[int, list[tuple[int, IssuedOp]]] = defaultdict(list)
        self._incomplete = {rank for rank, dump in found.dumps.items() if dump.unreadable}
        for key in found.groups:
            self._look_at(key)

    def _look_at(self, key: str) -> None:
        operations = self._found.operations[key]
        begun = {
            rank: {n: entry for n, entry in operations.get(rank, {}).items() if self._has_begun(entry)}
            for rank in self._found.groups[key].members
            if rank in self._found.dumps
        }
        completed = (n for theirs in begun.values() for n, each in theirs.items() if _needed_all(each))
        by_all, lost = max(completed, default=0), self._found.lost
        last = {rank: max(theirs, default=0) for rank, theirs in begun.items() if theirs or rank not in lost}
        least = max(by_all, min(last.values(), default=0))
        first = {
            rank: next((n for n, each in theirs.items() if not _is_over(n, each, least)), 0)
            for rank, theirs in begun.items()
        }
        if not (waits := {rank: number for rank, number in first.items() if number}):
            return
        self.waits[key] = waits
        earliest = min(waits, key=waits.__getitem__)
        if begun[earliest][waits[earliest]].operation in _ENDS_EARLY:
            self._incomplete |= begun.keys() - last.keys()
        for rank in begun:
            self._entered[rank][key] = max(by_all, last.get(rank, waits[earliest] - 1))
        self._compare(key, begun, max(waits.values()))

    def _compare(self, key: str, begun: Mapping[int, Mapping[int, Entry]], last: int) -> None:
        """Add operations up to number ``last``; later ones are only queued. See [Note: Lost entries]."""
        codes = self._found.codes
        start = max(min(theirs) for theirs in begun.values() if theirs)
        for rank, theirs in begun.items():
            digest, recent = 0, self._recent[rank]
            if start > 1 and min(theirs, default=0) == start:
                recent.append((-1, IssuedOp(key, start - 1, 0, 0, "an earlier operation")))
            for number, entry in theirs.items():
                if number > last:
                    break
                digest = codes[digest, entry.agreed] if number >= start else 0
                recent.append((entry.record, IssuedOp(key, number, codes[entry.agreed], digest, entry.text)))

    def report(self, rank: int) -> RankReport:
        """Return what an observer of this rank would have reported."""
        dump, waits = self._found.dumps[rank], any(rank in ranks for ranks in self.waits.values())
        progress = Progress(
            rank=rank,
            step=0,
            operation=dump.entries[-1].record + 1 if dump.entries else 0,
            phase=Phase.IDLE,
            issued=self._entered[rank],
            recent=Window([issued for _, issued in sorted(self._recent[rank], key=lambda each: each[0])]),
            at_communication=waits,
            silent_seconds=0.0,
        )
        return RankReport(
            rank,
            progress=progress,
            groups=[self._found.groups[key] for key in self._entered[rank]],
            waiting=waits,
            doing=self._doing(rank),
            is_incomplete=rank in self._incomplete,
        )

    def _doing(self, rank: int) -> str:
        """Describe the last operation of a rank."""
        if rank not in self._found.last:
            return "its dump contains no operations"
        key, number = self._found.last[rank]
        entry = self._found.operations[key][rank][number]
        title = f"{entry.text} number {number} of {self._found.groups[key].in_words}"
        if not self._has_begun(entry):
            return f"its host has issued {title}, which its device has not begun"
        state = "over" if entry.state is State.RETIRED else entry.state.value
        return f"its last operation is {title}, which is {state}"

    def _has_begun(self, entry: Entry) -> bool:
        """See [Note: Devices]."""
        return not self._by_device or not entry.is_on_device or entry.state is not State.SCHEDULED


def _needed_all(entry: Entry) -> bool:
    """Whether it can only have completed after all members had entered it."""
    return entry.state is State.COMPLETED and entry.operation not in (*_ENDS_EARLY, "send")


def _is_over(number: int, entry: Entry, least: int) -> bool:
    """See [Note: Dumps of different moments]; all members have entered the first ``least`` operations."""
    return number <= least if entry.state is State.RETIRED else entry.state is State.COMPLETED


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the dumps show."""

    has_hang: bool | None
    """None if unknown."""
    sentence: str
    incident: Incident | None
    """None if no rank waits, or if it is unknown for whom."""
    recording: Recording
    absent: tuple[int, ...]
    """Ranks without a dump."""
    waits: Mapping[str, Mapping[int, int]]
    """Group -> rank -> the first number that it has entered and that is not over."""


def explain(dumps: Sequence[Dump], world_size: int) -> Explanation:
    """Explain why the job of ``world_size`` ranks hangs, if it does."""
    found = Recording(dumps, world_size)
    mesh = Mesh.grid(pipeline=world_size)  # peers are unknown
    absent = tuple(sorted({*found.world} - found.dumps.keys()))
    for by_device in (True, False) if found.has_starts else (False,):
        view = _View(found, by_device=by_device)
        reports = {rank: view.report(rank) for rank in found.dumps}
        # A rank without a dump will not leave one in another round.
        incidents = diagnose(Round(reports, mesh, is_repeat=True, confirmed=absent, absent=_ABSENT)).incidents
        if incidents:
            break
    shown = found, absent, view.waits
    without = f"{named(absent)} {_ABSENT}"
    for incident in incidents[:1]:
        if 2 * len(absent) <= world_size or {*absent}.isdisjoint(incident.ranks):
            return Explanation(True, incident.sentence, incident, *shown)
        # Files are missing, rather than ranks.
        waiting = sorted({rank for ranks in view.waits.values() for rank in ranks})
        wait = f"{named(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for other ranks"
        doubt = f"{wait}, but {without}, so the missing rank cannot be identified"
        return Explanation(None, sentences(doubt), None, *shown)
    if not found.operations:
        return Explanation(None, "The dumps contain no operations.", None, *shown)
    if absent:
        doubt = f"no operation waits for a rank, but {without} and may have ended early"
        return Explanation(None, sentences(doubt), None, *shown)
    return Explanation(False, "The dumps show no hang: no operation waits for a rank.", None, *shown)
