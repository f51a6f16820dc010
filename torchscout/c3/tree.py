"""Exchanges among many ranks as a tree of small groups: within a host, then across hosts (paper, section 9).

[Note: a tree of groups] In one flat group, every rank is connected to every other, and a small collective has
as many rounds as there are ranks. In a tree, consecutive ranks form a group, the first members of these
groups form groups in turn, until one group is left. An exchange goes up level by level and its result comes
down again, so that the number of rounds grows with the logarithm of the job.

[Note: equal payloads travel once] Healthy peers send equal payloads. A level passes on runs of them: one
payload with the number of consecutive ranks that sent it. So evidence on which all ranks agree has the same
size at every level, and only disagreements are sent in full.

[Note: a failure goes down too] A rank below waits for the result longer than all levels above it wait
together, so that it does not give up while the others still succeed. If an exchange fails on a rank, the
ranks below receive the failure at once instead of waiting for their timeout.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from torchscout.errors import ChannelError

if TYPE_CHECKING:
    from torchscout.c3.channel import PeerChannel
    from torchscout.mesh import PeerGroup

__all__ = ["FAN_OUT", "Runs", "TreeChannel", "groups_of", "height_of"]

FAN_OUT = 16
"""Members of one group at most, except for those of one host."""
_HEADER, _LENGTH = struct.Struct("<BI"), struct.Struct("<Q")
_VERSION = 1
_DONE, _FAILED = b"\x01", b"\x00"

_Counts = npt.NDArray[np.uint32]
_Own = TypeVar("_Own")


def groups_of(position: int, size: int, width: int) -> list[range]:
    """Return the groups that a member belongs to, from the lowest level up, as ranges of positions.

    The lowest groups have ``width`` members, those above ``FAN_OUT``.
    """
    found: list[range] = []
    stride = 1
    while True:
        reach = stride * width
        if reach >= size:
            return [*found, range(0, size, stride)]
        first = position - position % reach
        found.append(range(first, min(first + reach, size), stride))
        if position != first:
            return found
        stride, width = reach, FAN_OUT


def height_of(size: int, width: int) -> int:
    """Return the number of levels."""
    return len(groups_of(0, size, width))  # the first member is in a group of every level


@dataclass(frozen=True, slots=True)
class Runs:
    """The payloads of consecutive ranks; see [Note: equal payloads travel once]."""

    counts: _Counts
    """Ranks in each run."""
    lengths: _Counts
    """Bytes of each run's payload."""
    payloads: bytes
    """The payloads of all runs, one after the other."""

    @classmethod
    def of(cls, payload: bytes) -> Runs:
        """Return the run of a single rank."""
        return cls(_counts([1]), _counts([len(payload)]), payload)

    @classmethod
    def joined(cls, parts: Sequence[Runs]) -> Runs:
        """Return the runs of one part after the other; equal neighbours become one run."""
        first, *others = parts
        counts, lengths, payloads = [first.counts], [first.lengths], [first.payloads]
        last = first._payload(-1)
        for each in others:
            own, sizes, bodies = each.counts, each.lengths, each.payloads
            if each._payload(0) == last:
                counts[-1] = counts[-1].copy()
                counts[-1][-1] += own[0]
                own, sizes, bodies = own[1:], sizes[1:], bodies[len(last) :]
            if len(own):
                counts.append(own)
                lengths.append(sizes)
                payloads.append(bodies)
                last = each._payload(-1)
        return cls(np.concatenate(counts), np.concatenate(lengths), b"".join(payloads))

    def _payload(self, end: int) -> bytes:
        size = int(self.lengths[end])
        return self.payloads[:size] if end == 0 else self.payloads[len(self.payloads) - size :]

    def encode(self) -> bytes:
        return b"".join(
            (
                _HEADER.pack(_VERSION, len(self.counts)),
                self.counts.tobytes(),
                self.lengths.tobytes(),
                self.payloads,
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> Runs:
        """Raises ``ChannelError`` if another version of torchscout sent the data."""
        version, number = _HEADER.unpack_from(data)
        if version != _VERSION:
            raise ChannelError(
                f"a rank sent evidence in format {version}, but this one uses {_VERSION}; "
                "all ranks must run the same version of torchscout"
            )
        start, size = _HEADER.size, 4 * number
        counts = np.frombuffer(data, "<u4", number, start)
        lengths = np.frombuffer(data, "<u4", number, start + size)
        return cls(counts, lengths, data[start + 2 * size :])

    def by_rank(self) -> list[bytes]:
        """Return every rank's payload. Those of one run are the same object."""
        found: list[bytes] = []
        start = 0
        for count, length in zip(self.counts.tolist(), self.lengths.tolist(), strict=True):
            found += [self.payloads[start : start + length]] * count
            start += length
        return found


def _counts(values: Sequence[int]) -> _Counts:
    return np.array(values, "<u4")


class TreeChannel:
    """A ``PeerChannel`` over channels of small groups; see [Note: a tree of groups]."""

    def __init__(self, peers: PeerGroup, position: int, levels: Sequence[PeerChannel], width: int) -> None:
        """``levels`` are the channels of the groups that ``groups_of`` returns, in the same order."""
        self.peers, self.position = peers, position
        self._levels, self._groups = levels, groups_of(position, len(peers), width)
        self.height = height_of(len(peers), width)
        """How many levels there are; 1 if all peers are in one group."""

    def gather(self, payload: bytes) -> list[bytes]:
        if self.height == 1:
            return self._levels[0].gather(payload)
        joined = self._up([Runs.of(payload)], _joined)
        (runs,) = _unpacked(self._down(_packed(joined), self._levels[: self.height - 1]))
        return runs.by_rank()

    def highest(self, values: Sequence[int]) -> list[int]:
        if self.height == 1:
            return self._levels[0].highest(values)
        layout = struct.Struct(f"<{len(values)}q")
        found = self._up([*values], lambda level, own: level.highest(own))
        return [*layout.unpack(self._down(layout.pack(*found), self._levels[: self.height - 1]))]

    def consult(self, payloads: Sequence[bytes], answer: Callable[[list[Runs]], bytes]) -> bytes:
        """Return what the first peer answers to the payloads of all peers, which no other peer needs.

        Every peer passes equally many payloads; ``answer`` receives the runs of each. It must not raise.
        """
        joined = self._up([Runs.of(each) for each in payloads], _joined)
        given = answer(joined) if self.position == 0 else b""
        return self._down(given, self._levels)

    def broadcast(self, payload: bytes, *, source: int) -> bytes:
        for level, place in self.hops(source):
            payload = self._levels[level].broadcast(payload, source=place)
        return payload

    def hops(self, source: int) -> list[tuple[int, int]]:
        """Return the broadcasts by which this member receives and passes on what ``source`` sends.

        Each is the number of a level and the place of the sender in its group: first those on the way from
        the source to the top, then those from the top down.
        """
        senders = [source - source % group.step for group in self._groups]
        up = [
            (level, group.index(sender))
            for level, (group, sender) in enumerate(zip(self._groups, senders, strict=True))
            if sender in group
        ]
        passed = {level for level, _ in up}
        return up + [(level, 0) for level in reversed(range(len(self._groups))) if level not in passed]

    def _up(self, own: _Own, merge: Callable[[PeerChannel, _Own], _Own]) -> _Own:
        """Return what is known to the highest group of this member."""
        for number, level in enumerate(self._levels):
            with self._failing_together(number):
                own = merge(level, own)
        return own

    def _down(self, result: bytes, levels: Sequence[PeerChannel]) -> bytes:
        """Return the result of the first peer, which comes down over these levels of the tree."""
        message = _DONE + result
        for number in reversed(range(len(levels))):
            with self._failing_together(number):
                message = levels[number].broadcast(message, source=0)
        if message[:1] == _FAILED:
            raise ChannelError(message[1:].decode(errors="replace"))
        return message[1:]

    @contextmanager
    def _failing_together(self, number: int) -> Iterator[None]:
        """Pass a failure on to the ranks below this level; see [Note: a failure goes down too]."""
        try:
            yield
        except ChannelError as error:
            with suppress(ChannelError):  # the ranks below may have failed too
                for level in reversed(self._levels[:number]):
                    level.broadcast(_FAILED + str(error).encode(), source=0)
            raise


def _joined(level: PeerChannel, own: Sequence[Runs]) -> list[Runs]:
    gathered = [_unpacked(each) for each in level.gather(_packed(own))]
    return [Runs.joined(parts) for parts in zip(*gathered, strict=True)]


def _packed(parts: Sequence[Runs]) -> bytes:
    encoded = [each.encode() for each in parts]
    return b"".join(data for each in encoded for data in (_LENGTH.pack(len(each)), each))


def _unpacked(message: bytes) -> list[Runs]:
    found: list[Runs] = []
    start = 0
    while start < len(message):
        (length,) = _LENGTH.unpack_from(message, start)
        start += _LENGTH.size
        found.append(Runs.decode(message[start : start + length]))
        start += length
    return found
