"""The dumps of all ranks, counted per line of communication (paper, section 7). Facts only.

A collective has its number in the dump. A send or receive has none that both ends share, so it is counted
per direction, from the first that the dump shows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchscout.decision.hang.flight_recorder import Dump, Entry, State, launch_of
from torchscout.decision.progress import CommGroup

__all__ = ["WORLD", "Operation", "Recording", "recording"]

WORLD = "default_pg"
"""How PyTorch describes the group of all ranks."""


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
    """What all dumps together say."""

    world_size: int
    ranks: tuple[int, ...]
    """Those that left a dump, ascending."""
    lines: Mapping[str, CommGroup]
    operations: Mapping[str, Mapping[int, Operations]]
    """Line -> rank -> what it has issued there; only ranks that show something."""
    enqueued: Mapping[tuple[str, int], int]
    """Line and rank -> the last number it has issued, where no operation shows it."""
    guessed: frozenset[str]
    """Lines whose members are not recorded, and were taken to be the ranks that used them."""
    times_starts: bool
    """Whether the dumps tell what a device has begun from what is only issued."""
    is_on_device: bool
    """Whether any operation ran on a device, that is: not over Gloo."""

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


class _Codes:
    """Small numbers, the same for equal values only."""

    def __init__(self) -> None:
        self._codes: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        return self._codes.setdefault(value, len(self._codes))


def recording(dumps: Sequence[Dump], world_size: int) -> Recording:
    """Raises ``ValueError`` where two dumps cannot be of one job."""
    groups = _Groups(dumps, world_size)
    operations: dict[str, dict[int, dict[int, Operation]]] = defaultdict(lambda: defaultdict(dict))
    code = _Codes()
    for dump in dumps:
        launches = {launch_of(each): each.state for each in dump.entries if each.operation == "coalesced"}
        for line, number, entry in _numbered(dump, groups):
            state = launches.get(launch_of(entry), entry.state)
            before = operations[line][dump.rank].get(number)
            operations[line][dump.rank][number] = _merged(before, number, entry, state, code)
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
    """Line, number and entry of all that communicates."""
    transfers: Counter[str] = Counter()
    for entry in dump.entries:
        if entry.ends is not None:
            if (key := groups.pair(dump, entry)) is not None:
                transfers[key] += 1
                yield key, transfers[key], entry
        elif not entry.is_transfer and entry.collective > 0:
            yield groups.line(dump, entry), entry.collective, entry


def _merged(before: Operation | None, number: int, entry: Entry, state: State, code: _Codes) -> Operation:
    if before is None:
        return Operation(number, code(entry.agreed), entry.text, state, entry)
    if entry.operation == "coalesced":  # the launch of what came before, which has a text already
        return replace(before, state=state)
    text = before.text if before.text.endswith(", ...") else f"{before.text}, ..."
    fingerprint = code((before.fingerprint, entry.agreed))
    return Operation(number, fingerprint, text, state, entry)


def _align(operations: dict[int, dict[int, Operation]]) -> None:
    """Give both ends the same numbers where older transfers are lost: as many have completed at each."""
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
    """What ``pg_status`` says of ranks whose own entries of a group are lost.

    It counts groups as each process does, so it is used only where all others count a group alike; and
    on Gloo, or where there are transfers, it counts those too.
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
    """Whether starts are recorded wherever one should be."""
    on_device = [entry for dump in dumps for entry in dump.entries if entry.backend != "gloo"]
    completed = [entry for entry in on_device if entry.state is State.COMPLETED]
    return any(entry.was_started for entry in on_device) and all(entry.was_started for entry in completed)


class _Groups:
    """The lines of a job, by what its dumps say of process groups."""

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
        """The line of a collective."""
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
        """The line of a transfer; None where its ends are not in the group."""
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
        """Global ranks, and whether they are a guess."""
        if own := dump.groups.get(entry.group):
            return own, False
        others = {members for members in self._known[entry.group] if dump.rank in members}
        if len(others) == 1:
            return next(iter(others)), False
        if entry.description == WORLD:
            return self._world, False
        used = self._used[entry.group, entry.description]
        # A group that all others have used is one of all ranks, so those without a dump are of it too.
        return (self._world if used == self._dumped else tuple(sorted(used))), True


def _renamed(lines: Mapping[str, CommGroup]) -> dict[str, CommGroup]:
    """Lines that a person can tell apart: those of one description get their number as well."""
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
