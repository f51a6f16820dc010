"""Numbers the operations in the dumps of all ranks, per line of communication (paper, section 7).

A dump has the number of a collective. A send or receive has no number that both ends share, so transfers are
counted per direction, from the first one in the dump.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchscout.decision.flight_recorder import Dump, Entry, State, launch_of
from torchscout.decision.progress import CommGroup

__all__ = ["WORLD", "Operation", "Recording", "recording"]

WORLD = "default_pg"
"""PyTorch's description of the group of all ranks."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One numbered operation of one rank: an entry, or several that were launched together."""

    number: int
    fingerprint: int
    """Equal where ``Entry.agreed`` is equal."""
    text: str
    state: State
    entry: Entry
    """The last one, where several were launched together."""

    @property
    def needs_all(self) -> bool:
        return self.entry.needs_all


Operations = Mapping[int, Operation]
"""Number -> operation."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The contents of all dumps together."""

    world_size: int
    ranks: tuple[int, ...]
    """Ranks with a dump, ascending."""
    lines: Mapping[str, CommGroup]
    operations: Mapping[str, Mapping[int, Operations]]
    """Line -> rank -> its operations; only ranks that have some."""
    enqueued: Mapping[tuple[str, int], int]
    """Line and rank -> the last number it has issued, if no operation shows it."""
    guessed: frozenset[str]
    """Lines whose members are not recorded; the ranks that used them are assumed to be their members."""
    times_starts: bool
    """Whether the dumps distinguish what a device has begun from what is only issued."""
    is_on_device: bool
    """Whether any operation ran on a device, that is, not over Gloo."""

    def of(self, line: str, rank: int) -> Operations:
        return self.operations[line].get(rank, {})

    def last(self, rank: int) -> tuple[str, Operation] | None:
        """The last operation a rank has issued, with its line."""
        theirs = [
            (line, operations[rank][max(operations[rank])])
            for line, operations in self.operations.items()
            if operations.get(rank)
        ]
        return max(theirs, key=lambda each: each[1].entry.record, default=None)


class _Codes(dict[Hashable, int]):
    """Small integers, equal for equal values only."""

    def __missing__(self, value: Hashable) -> int:
        return self.setdefault(value, len(self))


def recording(dumps: Sequence[Dump], world_size: int) -> Recording:
    """Number the operations of all dumps."""
    groups = _Groups(dumps, world_size)
    operations: dict[str, dict[int, dict[int, Operation]]] = defaultdict(lambda: defaultdict(dict))
    codes = _Codes()
    for dump in dumps:
        launches = {launch_of(each): each.state for each in dump.entries if each.operation == "coalesced"}
        for line, number, entry in _numbered(dump, groups):
            state = launches.get(launch_of(entry), entry.state)
            before = operations[line][dump.rank].get(number)
            operations[line][dump.rank][number] = _merged(before, number, entry, state, codes)
    lost = {dump.rank for dump in dumps if dump.has_lost_entries}
    for pair in (line for line in groups.lines.values() if line.pair):
        if not lost.isdisjoint(pair.members):
            _align(operations[pair.key])
    return Recording(
        world_size=world_size,
        ranks=tuple(sorted(dump.rank for dump in dumps)),
        lines=_renamed(groups.lines),
        operations=operations,
        enqueued=_enqueued(dumps, groups, operations),
        guessed=frozenset(groups.guessed),
        times_starts=_times_starts(dumps),
        is_on_device=any(entry.backend != "gloo" for dump in dumps for entry in dump.entries),
    )


def _numbered(dump: Dump, groups: _Groups) -> Iterable[tuple[str, int, Entry]]:
    """Yield line, number and entry of every operation that communicates."""
    transfers: Counter[str] = Counter()
    for entry in dump.entries:
        if entry.ends is not None:
            if (key := groups.pair(dump, entry)) is not None:
                transfers[key] += 1
                yield key, transfers[key], entry
        elif not entry.is_transfer and entry.collective > 0:
            yield groups.line(dump, entry), entry.collective, entry


def _merged(before: Operation | None, number: int, entry: Entry, state: State, codes: _Codes) -> Operation:
    if before is None:
        return Operation(number, codes[entry.agreed], entry.text, state, entry)
    if entry.operation == "coalesced":  # the launch of the entries before it, which have a text
        return replace(before, state=state)
    text = before.text if before.text.endswith(", ...") else f"{before.text}, ..."
    fingerprint = codes[before.fingerprint, entry.agreed]
    return Operation(number, fingerprint, text, state, entry)


def _align(operations: dict[int, dict[int, Operation]]) -> None:
    """Give both ends of a pair equal numbers if older transfers are lost: equally many have completed."""
    done = {
        rank: sum(each.state is State.COMPLETED for each in theirs.values())
        for rank, theirs in operations.items()
    }
    for rank, theirs in list(operations.items()):
        shift = max(done.values()) - done[rank]
        shifted = {number + shift: each for number, each in theirs.items()}
        operations[rank] = {number: replace(each, number=number) for number, each in shifted.items()}


def _enqueued(
    dumps: Sequence[Dump], groups: _Groups, operations: Mapping[str, Mapping[int, Operations]]
) -> dict[tuple[str, int], int]:
    """Read the last numbers of ranks whose entries of a group are lost from ``pg_status``.

    Each process numbers its groups itself, so this is used only if all other ranks give a group the same
    number, and only without Gloo and transfers, which it counts too.
    """
    ids: dict[str, set[int]] = defaultdict(set)
    with_transfers = set()
    for dump in dumps:
        for name, each in dump.ids.items():
            ids[name].add(each)
        with_transfers |= {entry.group for entry in dump.entries if entry.is_transfer}
        with_transfers |= {entry.group for entry in dump.entries if entry.backend == "gloo"}
    found = {}
    for dump in dumps:
        if dump.entries and not dump.has_lost_entries:
            continue
        for key, line in groups.lines.items():
            name = groups.names[key]
            if line.pair or dump.rank not in line.members or operations[key].get(dump.rank):
                continue
            if len(ids[name]) == 1 and name not in with_transfers:
                found[key, dump.rank] = dump.enqueued.get(next(iter(ids[name])), 0)
    return found


def _times_starts(dumps: Sequence[Dump]) -> bool:
    """Whether starts are recorded for all operations that must have one."""
    on_device = [entry for dump in dumps for entry in dump.entries if entry.backend != "gloo"]
    completed = [entry for entry in on_device if entry.state is State.COMPLETED]
    return any(entry.was_started for entry in on_device) and all(entry.was_started for entry in completed)


class _Groups:
    """The lines of a job, from what its dumps record about process groups."""

    def __init__(self, dumps: Sequence[Dump], world_size: int) -> None:
        self.lines: dict[str, CommGroup] = {}
        self.names: dict[str, str] = {}
        """Line -> name of its group."""
        self.guessed: set[str] = set()
        self._world = tuple(range(world_size))
        self._dumped = {dump.rank for dump in dumps}
        self._known: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self._used: dict[tuple[str, str], set[int]] = defaultdict(set)
        self._keys: dict[tuple[int, str, str], str] = {}
        for dump in dumps:
            for name, members in dump.groups.items():
                self._known[name].add(members)
            for entry in dump.entries:
                self._used[entry.group, entry.description].add(dump.rank)

    def line(self, dump: Dump, entry: Entry) -> str:
        """Return the line of a collective."""
        at = (dump.rank, entry.group, entry.description)
        if at not in self._keys:
            members, is_guess = self._members(dump, entry)
            key = f"{entry.group}/{entry.description}@{','.join(map(str, members))}"
            self.lines.setdefault(key, CommGroup(key, members, entry.description or entry.group))
            self.names[key] = entry.group
            if is_guess:
                self.guessed.add(key)
            self._keys[at] = key
        return self._keys[at]

    def pair(self, dump: Dump, entry: Entry) -> str | None:
        """Return the line of a transfer; None if its ends are not in the group."""
        assert entry.ends is not None
        members, _ = self._members(dump, entry)
        if max(entry.ends) >= len(members):
            return None
        source, destination = (members[place] for place in entry.ends)
        if source == destination:
            return None
        key = f"{entry.group}/{entry.description}@{','.join(map(str, members))}/{source}>{destination}"
        self.lines.setdefault(
            key, CommGroup(key, (source, destination), f"{source} -> {destination}", pair=True)
        )
        self.names[key] = entry.group
        return key

    def _members(self, dump: Dump, entry: Entry) -> tuple[tuple[int, ...], bool]:
        """Return global ranks, and whether they are guessed."""
        if own := dump.groups.get(entry.group):
            return own, False
        others = {members for members in self._known[entry.group] if dump.rank in members}
        if len(others) == 1:
            return next(iter(others)), False
        if entry.description == WORLD:
            return self._world, False
        used = self._used[entry.group, entry.description]
        # A group that all ranks with a dump have used probably has all ranks.
        return (self._world if used == self._dumped else tuple(sorted(used))), True


def _renamed(lines: Mapping[str, CommGroup]) -> dict[str, CommGroup]:
    """Add a number or members to names that several lines share."""
    count = Counter(line.name for line in lines.values())
    seen: Counter[str] = Counter()
    named = {}
    for key, line in lines.items():
        name = line.name
        if count[name] > 1:
            seen[name] += 1
            shown = ",".join(map(str, line.members[:4])) + (",..." if len(line.members) > 4 else "")
            name = f"{name} #{seen[name]}" if line.pair else f"{name} of ranks {shown}"
        named[key] = replace(line, name=name)
    return named
