"""An observer's report of its trainer in a round, and the binary post that carries it (paper, section 7).

    header      the trainer's state and coordinate, and the lengths of what follows
    rows        one for each line: what the rank has issued on it, and what its device has reached
    operations  the last ones, those of the first row before those of the second
    runs        the members of lines as (first, stride, count): groups are regular, however large they are
    phrases     fingerprints of operations; each is stored once
    strings     keys and names of lines, texts of phrases
    rest        JSON: what few posts have

A hub of a large job receives a hundred thousand of them at once. So a post is checked as it arrives, in a few
microseconds, and its operations are read only if the diagnosis asks for them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, get_args

from torchscout.decision.progress import (
    CommGroup,
    How,
    IssuedOp,
    Phase,
    Process,
    Progress,
    RankReport,
    Window,
)
from torchscout.observer.record.layout import LINES, PLACES
from torchscout.utils.network import read_json

__all__ = [
    "BUSY",
    "FLAGS",
    "HEADER",
    "KINDS",
    "MAYBE",
    "MISTAKES",
    "OPERATION",
    "PAIR",
    "PHASE",
    "PHASES",
    "PHRASE",
    "PLAIN",
    "PROCESS",
    "PROCESSES",
    "ROW",
    "RUN",
    "SPLITS",
    "WAITING",
    "Header",
    "Post",
    "Row",
    "hash_of",
]


class Header(NamedTuple):
    kind: int
    """Index in ``KINDS``, counted from 1; no JSON text begins with such a byte."""
    round: int
    rank: int
    flags: int
    """See ``FLAGS``."""
    gone_seconds: float
    """Not a number if the trainer is not gone."""
    step: int
    operation: int
    silent_seconds: float
    device_step: int
    """-1 if unknown."""
    captured: int
    rows: int
    operations: int
    runs: int
    phrases: int
    strings: int
    rest: int
    """Bytes of strings and of the rest; of the others their number."""


class Row(NamedTuple):
    key_hash: int
    """All members of a line have the same."""
    issued: int
    entered: int
    """-1 if the host enters operations itself, or if unknown."""
    operations: int
    runs: int
    """0 for a line of unknown members."""
    key: int
    name: int
    """Lengths in bytes."""
    flags: int
    """``PAIR``, and ``SPLITS`` if operations of this row have splits."""
    timeout: float
    """Seconds; 0 if unknown."""


KINDS = ("report", "leave")
HEADER = struct.Struct("<BQIIdqqdqqHHIHII")
ROW = struct.Struct("<QqqHIHHBf")
OPERATION = struct.Struct("<QHHB")
"""Digest, how many operations of the line follow it, its place among all operations, its phrase."""
RUN = struct.Struct("<iii")
PHRASE = struct.Struct("<QH")
"""Fingerprint, length of the text."""

FLAGS = {
    name: 1 << bit
    for bit, name in enumerate(
        (
            *("moving", "excused", "is_incomplete", "near_timeout", "has_timed_out", "has_progress"),
            *("at_communication", "is_restarting"),
        )
    )
}
PAIR, SPLITS = 1, 2
WAITING, BUSY, PROCESS, PHASE = 8, 10, 12, 16
"""Bits at which small numbers begin: 0, 1, 2 for None, False, True; indices of process and phase."""
assert max(FLAGS.values()) < 1 << WAITING
PLAIN = ("moving", "excused", "is_incomplete", "near_timeout", "has_timed_out", "is_restarting")
PROCESSES, PHASES, MAYBE = tuple(Process), tuple(Phase), (None, False, True)

MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)
"""What handling a message may raise, by a mistake of ours or of the peer: it is counted and dropped."""


@lru_cache(1 << 12)
def hash_of(key: str) -> int:
    """Return what stands for the key of a line where many are compared."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


class Post:
    """A report as bytes. What it says of its own layout is checked, so that reading it does not fail."""

    __slots__ = ("data", "header")

    def __init__(self, data: bytes, size: int) -> None:
        """Raises one of ``MISTAKES`` if this is not a post from a job with ``size`` ranks."""
        if len(data) < HEADER.size:
            raise ValueError(f"a post has {HEADER.size} bytes or more, got {len(data)}")
        self.data, self.header = data, Header._make(HEADER.unpack_from(data))
        _check(self, size)

    @property
    def kind(self) -> str:
        return KINDS[self.header.kind - 1]

    @property
    def gone_seconds(self) -> float | None:
        seconds = self.header.gone_seconds
        return None if math.isnan(seconds) else seconds

    @property
    def process(self) -> Process:
        return PROCESSES[self.header.flags >> PROCESS & 3]

    @property
    def is_still(self) -> bool:
        """Whether the trainer's stacks are of interest."""
        return not self.header.flags & FLAGS["moving"] and self.process is Process.RUNNING

    @property
    def starts(self) -> tuple[int, ...]:
        """Where rows, operations, runs, phrases, strings and the rest begin."""
        rows, operations, runs, phrases, strings = self.header[10:15]
        operations_at = HEADER.size + rows * ROW.size
        runs_at = operations_at + operations * OPERATION.size
        phrases_at = runs_at + runs * RUN.size
        strings_at = phrases_at + phrases * PHRASE.size
        return HEADER.size, operations_at, runs_at, phrases_at, strings_at, strings_at + strings

    @property
    def rest(self) -> Mapping[str, Any]:
        """What few posts have."""
        found: Mapping[str, Any] = read_json(self.data[self.starts[-1] :]) if self.header.rest else {}
        return found

    def rows(self) -> Iterator[Row]:
        at, end, *_ = self.starts
        return map(Row._make, ROW.iter_unpack(self.data[at:end]))

    def report(self, groups: dict[bytes, CommGroup] | None = None) -> RankReport:
        """Return what was reported; its window of operations is read when it is asked for.

        ``groups`` are those of the posts that were read before, so that members are listed once for all.
        """
        flags, rest, known = self.header.flags, self.rest, {} if groups is None else groups
        is_set: dict[str, Any] = {name: bool(flags & FLAGS[name]) for name in PLAIN}
        rows = [*self.rows()]
        theirs = [*self._groups(rows, known)]
        stalled, (how, status, why) = rest.get("stalled"), rest.get("ended", (None, None, ""))
        return RankReport(
            rank=self.header.rank,
            process=self.process,
            progress=self._progress(rows, theirs) if flags & FLAGS["has_progress"] else None,
            groups=tuple(each for each in theirs if each.members),
            waiting=MAYBE[flags >> WAITING & 3],
            gone_seconds=self.gone_seconds,
            how=how,
            wait_status=status,
            why=why,
            stalled=None if stalled is None else Progress.from_json(stalled),
            operations=rest.get("operations"),
            phase_seconds={Phase(name): each for name, each in rest.get("phase_seconds", {}).items()},
            **is_set,
        )

    def _groups(self, rows: Sequence[Row], known: dict[bytes, CommGroup]) -> Iterator[CommGroup]:
        _, _, runs_at, _, at, _ = self.starts
        for row in rows:
            runs, end = self.data[runs_at : runs_at + row.runs * RUN.size], at + row.key + row.name
            declared = self.data[at:end] + runs + bytes((row.flags & PAIR,))
            if declared not in known:
                key, name = _strings(self.data, at, (row.key, row.name))
                members = tuple(
                    first + stride * place
                    for first, stride, count in RUN.iter_unpack(runs)
                    for place in range(count)
                )
                known[declared] = CommGroup(key, members, name, bool(row.flags & PAIR), row.timeout or None)
            yield known[declared]
            runs_at, at = runs_at + row.runs * RUN.size, end

    def _progress(self, rows: Sequence[Row], groups: Sequence[CommGroup]) -> Progress:
        header, flags = self.header, self.header.flags
        return Progress(
            rank=header.rank,
            step=header.step,
            operation=header.operation,
            phase=PHASES[flags >> PHASE & 15],
            issued={group.key: row.issued for group, row in zip(groups, rows, strict=True)},
            recent=_PostedWindow(self, rows, groups),
            at_communication=bool(flags & FLAGS["at_communication"]),
            silent_seconds=header.silent_seconds,
            device_step=None if header.device_step < 0 else header.device_step,
            entered={
                group.key: row.entered for group, row in zip(groups, rows, strict=True) if row.entered >= 0
            },
            device_busy=MAYBE[flags >> BUSY & 3],
            captured=header.captured,
        )


class _PostedWindow(Window):
    """The operations of a post. The last one of each group is read at once, all of them when it must be."""

    def __init__(self, post: Post, rows: Sequence[Row], groups: Sequence[CommGroup]) -> None:
        self._post, self._rows, self._groups = post, rows, groups

    def _last(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield key, number, digest and place of the last operation of each group."""
        at = self._post.starts[1]
        for group, row in zip(self._groups, self._rows, strict=True):
            at += row.operations * OPERATION.size
            if row.operations:
                digest, age, order, _ = OPERATION.unpack_from(self._post.data, at - OPERATION.size)
                yield group.key, row.issued - age, digest, order

    @cached_property
    def newest(self) -> tuple[str, int] | None:
        *_, last = (None, *sorted(self._last(), key=itemgetter(3)))
        return None if last is None else last[:2]

    @cached_property
    def digests(self) -> Mapping[str, int]:
        return {key: digest for key, _, digest, _ in self._last()}

    @cached_property
    def last_numbers(self) -> Mapping[str, int]:
        return {key: number for key, number, _, _ in self._last()}

    def has_splits(self, group: str) -> bool:
        return any(
            row.flags & SPLITS
            for each, row in zip(self._groups, self._rows, strict=True)
            if each.key == group
        )

    @cached_property
    def _operations(self) -> Sequence[IssuedOp]:  # type: ignore[override]
        data, (_, operations_at, runs_at, phrases_at, strings_at, _) = self._post.data, self._post.starts
        phrases = [*PHRASE.iter_unpack(data[phrases_at:strings_at])]
        texts_at = strings_at + sum(row.key + row.name for row in self._rows)
        texts = [*_strings(data, texts_at, [length for _, length in phrases])]
        splits = self._post.rest.get("splits", {})
        packed, found = OPERATION.iter_unpack(data[operations_at:runs_at]), list[tuple[int, IssuedOp]]()
        for row, group in zip(self._rows, self._groups, strict=True):
            for digest, age, order, phrase in islice(packed, row.operations):
                sends, receives = splits.get(str(order), (None, None))
                issued = IssuedOp(
                    group=group.key,
                    number=row.issued - age,
                    fingerprint=phrases[phrase][0],
                    digest=digest,
                    text=texts[phrase],
                    sends=None if sends is None else tuple(sends),
                    receives=None if receives is None else tuple(receives),
                )
                found.append((order, issued))
        return [issued for _, issued in sorted(found, key=itemgetter(0))]


def _check(post: Post, size: int) -> None:
    """Raise one of ``MISTAKES`` unless the post can be read."""
    header, data, flags = post.header, post.data, post.header.flags
    rows_at, operations_at, runs_at, phrases_at, strings_at, rest_at = post.starts
    small = flags >> WAITING & 3, flags >> BUSY & 3, flags >> PROCESS & 3
    if (
        not 1 <= header.kind <= len(KINDS)
        or rest_at + header.rest != len(data)
        or header.rank >= size
        or max(small) > 2
        or flags >> PHASE & 15 >= len(PHASES)
        or header.rows > LINES
        or header.operations > PLACES
        or math.isinf(header.gone_seconds)
        or not math.isfinite(header.silent_seconds)
    ):
        raise ValueError(f"not a post: {header}")
    operations = runs = strings = counted = 0
    hashes = set()
    for key_hash, issued, _, of_row, its_runs, key, name, _, _ in ROW.iter_unpack(
        data[rows_at:operations_at]
    ):
        operations, runs, strings = operations + of_row, runs + its_runs, strings + key + name
        hashes.add(key_hash)
        counted |= issued
    for _, length in PHRASE.iter_unpack(data[phrases_at:strings_at]):
        strings += length
    found = operations, runs, strings, len(hashes)
    if found != (header.operations, header.runs, header.strings, header.rows):
        raise ValueError(f"rows and phrases do not fit the post: {header}")
    if not flags & FLAGS["has_progress"] and (operations or counted):
        raise ValueError("a rank without progress has issued operations")
    if (
        operations
        and max(data[operations_at + OPERATION.size - 1 : runs_at : OPERATION.size]) >= header.phrases
    ):
        raise ValueError("an operation has no phrase")
    _check_members(data[runs_at:phrases_at], header.rows, size)
    if header.rest:
        _check_rest(post.rest, header.rank)


def _check_members(runs: bytes, rows: int, size: int) -> None:
    members = 0
    for first, stride, count in RUN.iter_unpack(runs):
        members += count
        last = first + stride * (count - 1)
        if not (0 < count <= size and 0 <= first < size and 0 <= last < size):
            raise ValueError(f"members must be ranks below {size}, got {first} to {last}")
    if members > size * rows:
        raise ValueError(f"a line has more members than there are ranks ({size})")


def _check_rest(rest: Mapping[str, Any], rank: int) -> None:
    if not rest.keys() <= {"stalled", "operations", "phase_seconds", "splits", "ended"}:
        raise ValueError(f"unknown keys: {rest.keys()!r:.80}")
    if "stalled" in rest and Progress.from_json(rest["stalled"]).rank != rank:
        raise ValueError(f"rank {rank} reports for another one")
    if not isinstance(rest.get("operations", {}), dict):
        raise ValueError("operations of a Flight Recorder are an object")
    how, status, why = rest.get("ended", ("unknown", None, ""))
    if how not in get_args(How) or not (status is None or type(status) is int) or not isinstance(why, str):
        raise ValueError(f"a trainer ended {how!r:.40} with status {status!r:.40}: {why!r:.40}")
    for name, seconds in rest.get("phase_seconds", {}).items():
        if Phase(name) and type(seconds) not in (int, float):
            raise ValueError(f"{name} takes {seconds!r:.40}")
    for sends, receives in rest.get("splits", {}).values():
        if not all(type(each) is int and abs(each) < 1 << 63 for each in (*(sends or ()), *(receives or ()))):
            raise ValueError("splits must be integers")


def _strings(data: bytes, at: int, lengths: Sequence[int]) -> Iterator[str]:
    for length in lengths:
        yield data[at : at + length].decode(errors="replace")
        at += length
