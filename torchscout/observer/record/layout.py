"""The bytes of the progress record: where each part is, and how it is written and read (paper, section 7).

    header      the writer; never changes
    words       single numbers: flags, lengths, counts of durations
    durations   recent seconds of each phase, then of whole steps
    counts      operations issued on each line
    entered     operations that the device has reached on each line
    heads       the coordinate, twice, written alternately
    ring        the last operations of all lines, with the splits of an AllToAll
    journal     declarations of lines and phrases, appended

[Note: never torn] Heads and operations end in a check, the hash of their fields, and a reader uses only those
whose check fits; all other numbers are stored by one instruction. So little depends on the order in which
another core sees stores, and neither end waits. An operation is written to the ring first, then the head that
mentions it, then the count of its line. A writer that is stopped or killed in between leaves invalid at most
the older head, a place of the ring that no reader uses yet, or the count of a line whose last operation is in
the ring. The usual odd-and-even lock would leave a dead trainer's record unreadable, which is when it is
needed most.

The journal has one JSON text per line: an object declares a communication line, a string is the text of a
fingerprint (a phrase). The index of either is its position among its kind.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchscout.decision.progress import CommGroup, Phase

__all__ = [
    "Declarations",
    "Head",
    "Memory",
    "Operation",
    "line_text",
    "pack_operation",
    "phrase_text",
    "runs_of",
]

RECENT = 64
"""Operations that a reader returns."""
PLACES = 1024
"""Size of the ring. It is larger than ``RECENT`` so that the writer does not overtake a slow reader, and
because a device may be several hundred operations behind its host."""
LINES = 1024
SPLITS = 64
"""Maximum number of members of an AllToAll whose splits are kept."""
DURATIONS = 64
JOURNAL_BYTES = 1 << 20

PHASES = tuple(Phase)
CODES = {phase: code for code, phase in enumerate(PHASES)}
STEPS = len(PHASES)
"""The series of step durations, which follows those of the phases."""

# Native sizes and alignment, so that the struct module stores each number at once and not byte by byte.
HEADER = struct.Struct("8s4q16s")  # magic, version, rank, pid, start, boot
_HEAD = struct.Struct("6qdq")  # Head, check
_OPERATION = struct.Struct("4q2Q2iq")  # order, Operation with the lengths of its splits, check
_NO_SPLITS = -1

PAUSED, FINISHED, DEVICE_STEP, DEVICE_BUSY, DEVICE_ASKED, CAPTURED, JOURNAL_LENGTH, DROPPED, NOTED = range(9)
"""Indices of the words; from ``NOTED`` on, the number of durations noted in each series."""
EXITING, FAILING, RESTARTING, ASKED = 2, 3, 4, 5
"""Values of the word ``FINISHED`` while the interpreter exits, without and with an exception, when the
process leaves because it was decided to restart or to stop the job, and while SIGTERM ends it."""
UNKNOWN = -1
"""Value of a word if the device's progress is unknown."""

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
    """The coordinate as last published."""

    number: int
    """Counts publications from 1: the greater one of two heads is the newer."""
    step: int
    operation: int
    phase: int
    """Index in ``PHASES``."""
    at_communication: int
    issued: int
    """Number of operations so far, over all lines."""
    time: float
    """Monotonic time, which all processes of a machine share."""


class Operation(NamedTuple):
    """One issued operation."""

    line: int
    number: int
    """Counts the operations of its line from 1."""
    phrase: int
    """Index of its text; negative if that was not recorded."""
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
    """Return the bytes of an ``Operation``; ``order`` counts the operations of all lines from 1.

    Splits of more than ``SPLITS`` members are left out.
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
    """The bytes of a record, for either end. Only one thread may write at a time."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._bytes = memoryview(memory)
        self.words = self._bytes[WORDS_AT:DURATIONS_AT].cast("q")
        self._durations = self._bytes[DURATIONS_AT:COUNTS_AT].cast("d")
        self.counts = self._bytes[COUNTS_AT:ENTERED_AT].cast("q")
        self.entered = self._bytes[ENTERED_AT:HEADS_AT].cast("q")

    def put_head(self, number: int, *fields: float) -> None:
        """Write the fields of a ``Head``."""
        at = HEADS_AT + (number & 1) * _HEAD.size
        _pack_head(self._bytes, at, number, *fields, hash((number, *fields)))

    def head(self) -> Head | None:
        """Return the newest valid head; None if the writer has published more than once meanwhile."""
        even, odd = self._head(0), self._head(1)
        if even is not None and odd is not None:
            return max(even, odd)
        # The other one is being written; this one is the newest unless it has been overwritten since.
        whole = even or odd
        return whole if whole is not None and self._head(whole.number & 1) == whole else None

    def put_operation(self, order: int, packed: bytes) -> None:
        """``packed`` is the result of ``pack_operation``."""
        at = RING_AT + order % PLACES * _PLACE_BYTES
        self._bytes[at : at + len(packed)] = packed

    def operation(self, order: int) -> Operation | None:
        """Return None if it has been overwritten, or is being overwritten."""
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
        """Return the last durations of a series, oldest first."""
        count = self.words[NOTED + series]
        recent = range(max(0, count - DURATIONS), count)
        return [self._durations[series * DURATIONS + place % DURATIONS] for place in recent]

    def append(self, text: bytes) -> bool:
        """Append to the journal; return whether there was room."""
        length = self.words[JOURNAL_LENGTH]
        if length + len(text) > JOURNAL_BYTES:
            return False
        self._bytes[JOURNAL_AT + length : JOURNAL_AT + length + len(text)] = text
        self.words[JOURNAL_LENGTH] = length + len(text)
        return True

    def appended(self, since: int) -> bytes:
        """Return the journal from byte ``since`` on."""
        return bytes(self._bytes[JOURNAL_AT + since : JOURNAL_AT + self.words[JOURNAL_LENGTH]])

    def _head(self, turn: int) -> Head | None:
        *fields, check = _HEAD.unpack_from(self._bytes, HEADS_AT + turn * _HEAD.size)
        return Head(*fields) if hash(tuple(fields)) == check else None


_PHRASE_CHARACTERS = 256
_MAX_MEMBERS = 1 << 20
"""Members of one line, if the number of ranks is unknown."""


def line_text(line: CommGroup) -> bytes:
    declared = {"key": line.key, "name": line.name, "pair": line.pair, "members": runs_of(line.members)}
    return _text(declared if line.timeout is None else {**declared, "timeout": line.timeout})


def phrase_text(phrase: str) -> bytes:
    return _text(phrase[:_PHRASE_CHARACTERS])


class Declarations:
    """Reads a journal as it grows."""

    def __init__(self, size: int | None = None) -> None:
        """With ``size``, the number of ranks in the job, lines must have ranks of that job as members."""
        self._size = size
        self.lines: list[CommGroup] = []
        self.phrases: list[str] = []
        self.length = 0
        """Bytes read so far."""

    def has(self, line: int, phrase: int) -> bool:
        """Return whether both are declared."""
        return line < len(self.lines) and phrase < len(self.phrases)

    def extend(self, texts: bytes) -> None:
        """Read more of the journal; raises ``ValueError`` or ``LookupError`` for an invalid line."""
        for text in texts.splitlines(keepends=True):
            try:
                declared = json.loads(text)
            except ValueError:
                return  # this core sees the new length before the text, which will be complete next time
            if isinstance(declared, str):
                self.phrases.append(declared)
            else:
                self.lines.append(_line(declared, self._size))
            self.length += len(text)


def _text(declared: Any) -> bytes:
    return json.dumps(declared, separators=(",", ":")).encode() + b"\n"


def _line(declared: dict[str, Any], size: int | None) -> CommGroup:
    # A few bytes can stand for any number of members, so count them first.
    limit = _MAX_MEMBERS if size is None else size
    runs = declared["members"]
    if not all(type(number) is int for run in runs for number in run):
        raise ValueError(f"members must be (first, stride, count), got {runs!r:.80}")
    if any(count < 0 for _, _, count in runs) or sum(count for _, _, count in runs) > limit:
        raise ValueError(f"a line has more members than there are ranks ({limit}): {runs!r:.80}")
    members = tuple(first + stride * place for first, stride, count in runs for place in range(count))
    if size is not None and members and not 0 <= min(members) <= max(members) < size:
        raise ValueError(f"members must be ranks below {size}, got {min(members)} to {max(members)}")
    key, name, pair, timeout = declared["key"], declared["name"], declared["pair"], declared.get("timeout")
    if not (isinstance(key, str) and isinstance(name, str) and isinstance(pair, bool)):
        raise ValueError(f"not a line: {declared!r:.80}")
    if timeout is not None and type(timeout) not in (int, float):
        raise ValueError(f"a timeout must be a number of seconds, got {timeout!r:.40}")
    return CommGroup(key, members, name, pair, timeout)


def runs_of(members: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return ranks as (first, stride, count): the groups of a mesh are regular, however large they are."""
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
