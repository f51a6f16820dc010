"""The bytes of the progress record: what lies where, and how it is put and read (paper, section 7).

    header      who writes; never changes
    words       numbers that stand alone: flags, lengths, how many durations
    durations   recent seconds: of each phase, then of whole steps
    counts      how many operations each line has had
    entered     how many of them the device has come to
    heads       the coordinate, twice, written in turn
    ring        the last operations of all lines, with the splits of an AllToAll
    journal     lines and phrases as they are declared, appended

[Note: never torn] Heads and operations end in a check, the hash of their fields, and a reader takes
only what is whole; all other numbers are stored at once. So little depends on the order in which
another core sees stores, and nobody waits for anybody. Operations are put into the ring, then the
head that tells of them, then the count of their line. A writer that is stopped or killed in between
has spoilt no more than the older head, a place of the ring that no reader looks at yet, or the count
of a line whose last operation is in the ring. The usual odd-and-even lock would leave a dead
trainer's record unreadable, which is when it is needed most.

What a trainer declares once, for its observer to read as it comes: lines and phrases (paper, section 7).

One JSON text a line, of two kinds: an object is a communication line, a string is the text of a
fingerprint. The index of either is its place among its kind.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchscout.decision.progress import CommGroup, Phase

__all__ = ["Declarations", "Head", "Memory", "Operation", "line_text", "pack_operation", "phrase_text"]

RECENT = 64
"""Operations a reader gets to see."""
PLACES = 1024
"""Operations there is room for: the writer overtakes a slow reader only after as many more, and a device may
be several hundred operations behind its host."""
LINES = 1024
SPLITS = 64
"""Members an AllToAll may have for its splits to be kept."""
DURATIONS = 64
JOURNAL_BYTES = 1 << 20

PHASES = tuple(Phase)
CODES = {phase: code for code, phase in enumerate(PHASES)}
STEPS = len(PHASES)
"""The durations of whole steps come after those of each phase."""

# Native sizes and alignment: the struct module then stores each number at once, not byte by byte.
HEADER = struct.Struct("8s4q16s")  # magic, version, rank, pid, start, boot
_HEAD = struct.Struct("6qdq")  # Head, check
_OPERATION = struct.Struct("4q2Q2iq")  # order, Operation with the lengths of its splits, check
_NO_SPLITS = -1

PAUSED, FINISHED, DEVICE_STEP, DEVICE_BUSY, DEVICE_ASKED, CAPTURED, JOURNAL_LENGTH, DROPPED, NOTED = range(9)
"""The words; from ``NOTED`` on, how many durations were noted of each phase and of steps."""
EXITING = 2
"""In the word ``FINISHED``: the interpreter was about to end."""
UNKNOWN = -1
"""What a word holds where a device's progress is not known."""

_PLACE_BYTES = _OPERATION.size + 2 * SPLITS * 8
WORDS_AT = 64
DURATIONS_AT = WORDS_AT + 8 * (NOTED + STEPS + 1)
COUNTS_AT = DURATIONS_AT + 8 * DURATIONS * (STEPS + 1)
ENTERED_AT = COUNTS_AT + 8 * LINES
HEADS_AT = -(-(ENTERED_AT + 8 * LINES) // 64) * 64  # at a cache line
RING_AT = HEADS_AT + 2 * _HEAD.size
JOURNAL_AT = RING_AT + PLACES * _PLACE_BYTES
SIZE = JOURNAL_AT + JOURNAL_BYTES

_pack_head, _pack = _HEAD.pack_into, _OPERATION.pack


class Head(NamedTuple):
    """The coordinate, as last published."""

    number: int
    """Of the publication, from 1: the greater one of two heads is the newer."""
    step: int
    operation: int
    phase: int
    """Its place in ``PHASES``."""
    at_communication: int
    issued: int
    """Operations so far, over all lines."""
    time: float
    """By the monotonic clock, which all processes of a machine share."""


class Operation(NamedTuple):
    """One issued operation."""

    line: int
    number: int
    """Among those of its line, from 1."""
    phrase: int
    """Index of its text; negative where that was not recorded."""
    fingerprint: int
    digest: int
    sends: tuple[int, ...] | None
    receives: tuple[int, ...] | None


def pack_operation(
    order: int,
    line: int,
    number: int,
    phrase: int,
    fingerprint: int,
    digest: int,
    sends: Sequence[int] | None = None,
    receives: Sequence[int] | None = None,
) -> bytes:
    """An ``Operation`` and its place among those of all lines, from 1.

    Splits for more members than there is room for are left out.
    """
    if sends is None and receives is None:
        check = hash((order, line, number, phrase, fingerprint, digest, _NO_SPLITS, _NO_SPLITS))
        return _pack(order, line, number, phrase, fingerprint, digest, _NO_SPLITS, _NO_SPLITS, check)
    kept = [None if split is None or len(split) > SPLITS else split for split in (sends, receives)]
    counts = [_NO_SPLITS if split is None else len(split) for split in kept]
    splits = [elements for split in kept for elements in split or ()]
    check = hash((order, line, number, phrase, fingerprint, digest, *counts, *splits))
    packed = _pack(order, line, number, phrase, fingerprint, digest, *counts, check)
    return packed + struct.pack(f"{len(splits)}q", *splits)


class Memory:
    """The record's bytes, for either end. That one thread writes at a time is the writer's business."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._bytes = memoryview(memory)
        self.words = self._bytes[WORDS_AT:DURATIONS_AT].cast("q")
        self._durations = self._bytes[DURATIONS_AT:COUNTS_AT].cast("d")
        self.counts = self._bytes[COUNTS_AT:ENTERED_AT].cast("q")
        self.entered = self._bytes[ENTERED_AT:HEADS_AT].cast("q")

    def put_head(
        self,
        number: int,
        step: int,
        operation: int,
        phase: int,
        at_communication: int,
        issued: int,
        time: float,
    ) -> None:
        _pack_head(
            self._bytes,
            HEADS_AT + (number & 1) * _HEAD.size,
            number,
            step,
            operation,
            phase,
            at_communication,
            issued,
            time,
            hash((number, step, operation, phase, at_communication, issued, time)),
        )

    def head(self) -> Head | None:
        """The newest that is whole; None if the writer came by more than once in the meantime."""
        even, odd = self._head(0), self._head(1)
        if even is not None and odd is not None:
            return max(even, odd)
        # The other one is being written, and this one is the newest unless its own turn has come since.
        whole = even or odd
        return whole if whole is not None and self._head(whole.number & 1) == whole else None

    def put_operation(self, order: int, packed: bytes) -> None:
        """``packed`` by ``pack_operation``."""
        at = RING_AT + order % PLACES * _PLACE_BYTES
        self._bytes[at : at + len(packed)] = packed

    def operation(self, order: int) -> Operation | None:
        """None if another has taken its place, or is about to."""
        at = RING_AT + order % PLACES * _PLACE_BYTES
        *fields, sends, receives, check = _OPERATION.unpack_from(self._bytes, at)
        counts = max(0, sends), max(0, receives)
        if fields[0] != order or max(counts) > SPLITS:
            return None
        splits = struct.unpack_from(f"{sum(counts)}q", self._bytes, at + _OPERATION.size)
        if hash((*fields, sends, receives, *splits)) != check:
            return None
        _, line, number, phrase, fingerprint, digest = fields
        return Operation(
            line,
            number,
            phrase,
            fingerprint,
            digest,
            None if sends == _NO_SPLITS else splits[: counts[0]],
            None if receives == _NO_SPLITS else splits[counts[0] :],
        )

    def note(self, series: int, seconds: float) -> None:
        count = self.words[NOTED + series]
        self._durations[series * DURATIONS + count % DURATIONS] = seconds
        self.words[NOTED + series] = count + 1

    def noted(self, series: int) -> list[float]:
        """The last durations, oldest first."""
        count = self.words[NOTED + series]
        recent = range(max(0, count - DURATIONS), count)
        return [self._durations[series * DURATIONS + place % DURATIONS] for place in recent]

    def append(self, text: bytes) -> bool:
        """To the journal; whether there was room."""
        length = self.words[JOURNAL_LENGTH]
        if length + len(text) > JOURNAL_BYTES:
            return False
        self._bytes[JOURNAL_AT + length : JOURNAL_AT + length + len(text)] = text
        self.words[JOURNAL_LENGTH] = length + len(text)
        return True

    def appended(self, since: int) -> bytes:
        """The journal from the byte ``since`` on."""
        return bytes(self._bytes[JOURNAL_AT + since : JOURNAL_AT + self.words[JOURNAL_LENGTH]])

    def _head(self, turn: int) -> Head | None:
        *fields, check = _HEAD.unpack_from(self._bytes, HEADS_AT + turn * _HEAD.size)
        return Head(*fields) if hash(tuple(fields)) == check else None


_PHRASE = 256
"""Characters kept of a phrase."""
_MOST_MEMBERS = 1 << 20
"""Of one line, where nobody says how many ranks there are."""


def line_text(line: CommGroup) -> bytes:
    declared = {"key": line.key, "name": line.name, "pair": line.pair, "members": _runs(line.members)}
    return _text(declared if line.timeout is None else {**declared, "timeout": line.timeout})


def phrase_text(phrase: str) -> bytes:
    return _text(phrase[:_PHRASE])


class Declarations:
    """What has been declared, read as it grows."""

    def __init__(self, size: int | None = None) -> None:
        """With ``size``, of a job with so many ranks: a line with more members is a ``ValueError``."""
        self._size = size
        self.lines: list[CommGroup] = []
        self.phrases: list[str] = []
        self.length = 0
        """Bytes understood so far."""

    def has(self, line: int, phrase: int) -> bool:
        """Whether both were declared."""
        return line < len(self.lines) and phrase < len(self.phrases)

    def extend(self, texts: bytes) -> None:
        for text in texts.splitlines(keepends=True):
            try:
                declared = json.loads(text)
            except ValueError:
                return  # another core saw the journal's new length first; it is whole next time
            if isinstance(declared, str):
                self.phrases.append(declared)
            else:
                self.lines.append(_line(declared, self._size))
            self.length += len(text)


def _text(declared: Any) -> bytes:
    return json.dumps(declared, separators=(",", ":")).encode() + b"\n"


def _line(declared: dict[str, Any], size: int | None) -> CommGroup:
    # A few bytes can stand for as many members as there are numbers: count them first.
    limit = _MOST_MEMBERS if size is None else size
    runs = declared["members"]
    if not all(type(number) is int for run in runs for number in run):
        raise ValueError(f"members are (first, stride, count), got {runs!r:.80}")
    if any(count < 0 for _, _, count in runs) or sum(count for _, _, count in runs) > limit:
        raise ValueError(f"a line of more members than the {limit} ranks: {runs!r:.80}")
    members = tuple(first + stride * place for first, stride, count in runs for place in range(count))
    if size is not None and members and not 0 <= min(members) <= max(members) < size:
        raise ValueError(f"members are ranks below {size}, got {min(members)} to {max(members)}")
    key, name, pair, timeout = declared["key"], declared["name"], declared["pair"], declared.get("timeout")
    if not (isinstance(key, str) and isinstance(name, str) and isinstance(pair, bool)):
        raise ValueError(f"no line: {declared!r:.80}")
    if timeout is not None and type(timeout) not in (int, float):
        raise ValueError(f"a timeout is a number of seconds, got {timeout!r:.40}")
    return CommGroup(key, members, name, pair, timeout)


def _runs(members: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ranks as (first, stride, count): the groups of a mesh are regular, however large they are."""
    runs: list[tuple[int, int, int]] = []
    for member in members:
        first, stride, count = runs[-1] if runs else (0, 0, 0)
        if count == 1:
            runs[-1] = first, member - first, 2
        elif count and member == first + stride * count:
            runs[-1] = first, stride, count + 1
        else:
            runs.append((member, 0, 1))
    return runs
