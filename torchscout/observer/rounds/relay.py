"""Passes messages between hubs and the observers of one machine, in a job of many ranks (paper, section 7).

Without relays, a hub has a connection to every observer, reads each of their messages alone, and sends each
of them what all receive. In a job of at least ``ObserverConfig.min_relayed_ranks`` ranks, the observer of the
first rank of each machine is its relay, and hubs are connected to relays only.

To the observers of its machine, a relay looks like the hubs: it listens once for each of them, and only while
that hub is connected. To a hub it is one connection. What its observers send within a moment travels as one
compressed message, in which equal messages are one. What a hub sends to several of them travels once. A relay
reads none of that: hubs decide what absence means.

An observer whose relay is lost connects to the hubs itself. It also connects to a hub that has not answered
through the relay, since the relay may be stopped (``Client.go_direct``). A hub keeps in ``Routes`` how it
reaches each observer.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import itemgetter

import zmq

from torchscout.observer.rounds.post import KINDS
from torchscout.observer.rounds.protocol import (
    HUBS_AT_FIRST,
    LIMIT,
    Address,
    Tally,
    connect,
    encode,
    expanded,
    listen,
)
from torchscout.utils.network import read_json

__all__ = ["Relay", "Routes", "batches", "relay_endpoint"]

_RELAY = b"relay "
"""How the identity of a relay begins at a hub; its rank follows. That of an observer is its rank."""
_COUNT = struct.Struct("<I")
"""How many ranks follow, or the length of a message in a batch."""
_BATCH_SECONDS = 0.01
"""How long a message waits for others of its machine."""
_LEAVE = 1 + KINDS.index("leave")
"""How a post that is the last of its rank begins."""

_Context = zmq.Context[zmq.Socket[bytes]]


def relay_endpoint(token: str, relay: int, place: int | None) -> str:
    """Return where a relay listens for the hub at ``place``, or, with None, shows that it is there."""
    name = hashlib.sha256(f"torchscout relay\0{token}\0{relay}\0{place}".encode()).hexdigest()
    return f"ipc://@torchscout-{name[:32]}"


class Relay:
    """Runs in the process of one observer. It never waits."""

    def __init__(
        self,
        context: _Context,
        token: str,
        ranks: Collection[int],
        hubs: Sequence[Address],
        poller: zmq.Poller,
    ) -> None:
        """``ranks`` are those of this machine; the first is this observer's. Raises ``zmq.ZMQError``."""
        self._context, self._token, self._poller = context, token, poller
        self._ranks, self._rank, self._hubs = frozenset(ranks), min(ranks), hubs
        self._links: list[_Link] = []
        self._presence = self._listen(None)
        poller.register(self._presence, zmq.POLLIN)
        for place in range(min(HUBS_AT_FIRST, len(hubs))):
            self.open(place)

    @property
    def is_needed(self) -> bool:
        """Whether an observer of this machine has not sent its last report to every hub."""
        return any(link.is_needed for link in self._links)

    @property
    def deadline(self) -> float | None:
        """When to call ``tick`` if nothing arrives before."""
        return min((link.flush_at for link in self._links if link.flush_at is not None), default=None)

    def open(self, place: int) -> None:
        """Connect to the hub at ``place``; places are opened in their order."""
        upstream = connect(self._context, self._token, f"relay {self._rank}", self._hubs[place])
        self._poller.register(upstream, zmq.POLLIN)
        self._links.append(_Link(upstream, self._ranks, partial(self._listen, place), self._poller))

    def tick(self, now: float) -> None:
        """Pass on what has arrived."""
        while self._presence.poll(0, zmq.POLLIN):
            self._note_direct(*self._presence.recv_multipart(zmq.NOBLOCK)[:2])
        for link in self._links:
            link.tick(now)

    def _note_direct(self, identity: bytes, place: bytes) -> None:
        """Note that an observer has a connection of its own to a hub, and will send its last report there."""
        if identity.isdigit() and len(place) == 1 and place.isdigit() and int(place) < len(self._links):
            self._links[int(place)].left.add(int(identity))

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._presence.close()

    def _listen(self, place: int | None) -> zmq.Socket[bytes]:
        return listen(self._context, self._token, relay_endpoint(self._token, self._rank, place))


class _Link:
    """The connection to one hub, and the socket at which the observers of this machine find that hub."""

    def __init__(
        self,
        upstream: zmq.Socket[bytes],
        ranks: frozenset[int],
        listen_here: Callable[[], zmq.Socket[bytes]],
        poller: zmq.Poller,
    ) -> None:
        self._upstream, self._ranks, self._listen_here, self._poller = upstream, ranks, listen_here, poller
        self._front: zmq.Socket[bytes] | None = None
        self._batch: list[tuple[int, bytes]] = []
        self.left: set[int] = set()
        """Ranks whose observers send nothing more to this hub, or not through this relay."""
        self.flush_at: float | None = None
        """When the present batch is sent."""

    @property
    def is_needed(self) -> bool:
        return self._front is not None and (bool(self._batch) or not self.left >= self._ranks)

    def tick(self, now: float) -> None:
        self._follow_hub()
        if self._front is None:
            return
        while self._front.poll(0, zmq.POLLIN):
            self._collect(self._front.recv_multipart(zmq.NOBLOCK), now)
        if self.flush_at is not None and (now >= self.flush_at or len(self._batch) >= len(self._ranks)):
            self._flush()
        while self._upstream.poll(0, zmq.POLLIN):
            self._distribute(self._front, self._upstream.recv_multipart(zmq.NOBLOCK))

    def _follow_hub(self) -> None:
        """Listen while the hub is connected, so that the observers of this machine see whether it is."""
        is_connected = bool(self._upstream.poll(0, zmq.POLLOUT))
        if is_connected and self._front is None:
            with suppress(zmq.ZMQError):  # the last socket there may still be closing
                self._front = self._listen_here()
                self._poller.register(self._front, zmq.POLLIN)
        elif not is_connected and self._front is not None:
            self._poller.unregister(self._front)
            self._front.close()
            self._front, self._batch, self.flush_at = None, [], None

    def _collect(self, frames: Sequence[bytes], now: float) -> None:
        identity, message = frames[0], b"".join(frames[1:])
        if not identity.isdigit() or int(identity) not in self._ranks or not message:
            return
        if message[0] == _LEAVE:
            self.left.add(int(identity))
        self._batch.append((int(identity), message))
        if self.flush_at is None:
            self.flush_at = now + _BATCH_SECONDS

    def _flush(self) -> None:
        for batch in batches(self._batch):
            with suppress(zmq.Again):  # as for an observer: what cannot be sent now is not sent
                self._upstream.send(batch, zmq.NOBLOCK)
        self._batch, self.flush_at = [], None

    def _distribute(self, front: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        frame = b"".join(frames)
        try:
            ranks, at = _ranks(frame, 0)
        except ValueError:
            return
        message = frame[at:]
        missing = [rank for rank in ranks if not _deliver(front, str(rank).encode(), message)]
        if missing:
            with suppress(zmq.Again):
                self._upstream.send(encode("unreachable", ranks=missing), zmq.NOBLOCK)

    def close(self) -> None:
        if self._front is not None:
            self._flush()
            self._front.close()
        self._upstream.close()


class Routes:
    """How a hub reaches each observer: through the relay of its machine, or by its own connection."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        relays: Mapping[int, int],
        tally: Tally,
        on_missing: Callable[[Sequence[int]], None],
    ) -> None:
        """``on_missing`` is called with ranks that a relay does not reach."""
        self.relays = relays
        """The result of ``relay_ranks``."""
        self._socket, self._tally, self._on_missing = socket, tally, on_missing
        self._direct: set[int] = set()
        """Ranks that have a relay, but a connection of their own."""

    def send(self, ranks: Iterable[int], message: bytes) -> set[int]:
        """Send a message to these ranks; return those that are connected, as far as it is known here."""
        if len(message) > LIMIT:
            return set()
        behind, alone = defaultdict[int, list[int]](list), []
        for rank in ranks:
            relay = self.relays.get(rank)
            if relay is None or rank in self._direct:
                alone.append(rank)
            else:
                behind[relay].append(rank)
        reached = set[int]()
        for relay, some in behind.items():
            if self._send(_RELAY + str(relay).encode(), _packed(some) + message):
                reached.update(some)
            else:
                alone += some  # they may have noticed that it is lost
        return reached.union(rank for rank in alone if self._send(str(rank).encode(), message))

    def is_direct(self, rank: int) -> bool:
        """Return whether a rank that has a relay uses a connection of its own."""
        return rank in self._direct

    def is_searching(self, rank: int) -> bool:
        """Return whether a rank that is not reached may soon be: its relay is lost, which it notices."""
        return rank in self.relays and rank not in self._direct

    def read(self, identity: bytes, frame: bytes) -> Iterator[tuple[Sequence[int], bytes]]:
        """Yield the messages of a frame, each with the ranks of its senders; raises one of ``MISTAKES``."""
        if not identity.startswith(_RELAY):
            if (rank := int(identity)) in self.relays:
                self._direct.add(rank)
            yield (rank,), frame
            return
        relay = int(identity[len(_RELAY) :])
        if frame.startswith(b"{"):
            missing = [rank for rank in read_json(frame)["ranks"] if self.relays.get(rank) == relay]
            self._direct.update(missing)
            self._on_missing(missing)
            return
        for ranks, message in _messages(frame):
            for rank in ranks:
                if self.relays.get(rank) != relay:
                    raise ValueError(f"the relay of rank {relay} passes on messages of rank {rank}")
            self._direct.difference_update(ranks)
            yield ranks, message

    def _send(self, identity: bytes, *frames: bytes) -> bool:
        sent = _deliver(self._socket, identity, *frames)
        self._tally.sent += sent
        return sent


def _deliver(socket: zmq.Socket[bytes], identity: bytes, *frames: bytes) -> bool:
    """Return whether a client of this name is connected."""
    try:
        socket.send_multipart([identity, *frames], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno not in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
            raise
        return False
    return True


def batches(messages: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield as few frames as hold these messages, in their order."""
    body = b""
    for message, sent in groupby(messages, itemgetter(1)):
        entry = _packed([rank for rank, _ in sent]) + _COUNT.pack(len(message)) + message
        if body and len(body) + len(entry) > LIMIT:
            yield zlib.compress(body, 1)
            body = b""
        body += entry
    if body:
        yield zlib.compress(body, 1)


def _messages(frame: bytes) -> Iterator[tuple[Sequence[int], bytes]]:
    body, at = expanded(frame), 0
    while at < len(body):
        ranks, begin = _ranks(body, at)
        (length,) = _COUNT.unpack_from(body, begin) if begin + _COUNT.size <= len(body) else (LIMIT,)
        begin, at = begin + _COUNT.size, begin + _COUNT.size + length
        if at > len(body):
            raise ValueError("a batch ends within a message")
        yield ranks, body[begin:at]


def _packed(ranks: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ranks) + 1}I", len(ranks), *ranks)


def _ranks(frame: bytes, at: int) -> tuple[tuple[int, ...], int]:
    """Return the ranks that are packed at this place, and where they end; raises ``ValueError``."""
    count = int.from_bytes(frame[at : at + _COUNT.size], "little")
    end = at + _COUNT.size * (count + 1)
    if end > len(frame):
        raise ValueError(f"the frame ends within its {count} ranks")
    return struct.unpack_from(f"<{count}I", frame, at + _COUNT.size), end
