"""Messages among observers, and an observer's connections to the hubs (paper, section 7).

This replaces the paper's Gloo group, because a collective waits for exactly the observer that is gone.
Messages have a bounded size and are never pickles: reports are binary (``post``), all others JSON objects,
compressed where they are long.
Nothing here waits: a message that cannot be sent now is not sent, and a malformed one is counted and dropped.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from torchscout.decision.progress import RankReport
from torchscout.observer.rounds.post import KINDS, MISTAKES
from torchscout.observer.rounds.post_writer import post_of
from torchscout.utils.listener import Limits, Listener
from torchscout.utils.network import Address, CurveSockets, read_json
from torchscout.utils.network import encode as as_json

__all__ = [
    "HUBS_AT_FIRST",
    "LIMIT",
    "MAX_STACK",
    "MISTAKES",
    "Address",
    "Client",
    "Message",
    "Tally",
    "connect",
    "decode",
    "encode",
    "expanded",
    "listen",
    "listen_limited",
]

HUBS_AT_FIRST = 2
"""The hub and its standby. The other candidates in ``hub_ranks`` listen once they are elected."""
LIMIT = 4 << 20
"""Maximum size of a message in bytes; whoever sends more is disconnected."""
MAX_STACK = 8192
"""Characters of a trainer's stacks."""
_SOCKETS = CurveSockets("board 7", LIMIT)
connect, listen = _SOCKETS.connect, _SOCKETS.listen
_LIMITS = Limits(connections=64)
"""All observers of a job connect to its hub at the same time."""

_LONG = 512
"""Longer messages are compressed: what an incident says of many ranks, and stacks, repeat themselves."""
_COMPRESSED = b"x"
"""How such a message begins; neither a post nor a JSON object does."""

Message = dict[str, Any]


@dataclass(slots=True)
class Tally:
    """Counts the messages of one process; all zero while the job is healthy."""

    sent: int = 0
    received: int = 0
    malformed: int = 0


def encode(kind: str, **fields: Any) -> bytes:
    """Return a message; raises ``ValueError`` for a number that JSON does not have."""
    message = as_json(kind, **fields)
    return zlib.compress(message) if _LONG < len(message) <= LIMIT else message


def expanded(frame: bytes) -> bytes:
    """Return what was compressed; raises ``ValueError``."""
    if not frame.startswith(_COMPRESSED):
        return frame
    expanding = zlib.decompressobj()
    try:
        text = expanding.decompress(frame, LIMIT)
    except zlib.error as error:
        raise ValueError(f"not a compressed message: {error}") from error
    if not expanding.eof:
        raise ValueError(f"a compressed message is incomplete, or longer than {LIMIT} bytes")
    return text


def decode(frame: bytes, tally: Tally) -> Message | None:
    """Return the message, or None if it is neither a post nor a JSON object with a kind, and count it.

    A post is returned as it is, under its kind.
    """
    tally.received += 1
    if frame[:1] and frame[0] <= len(KINDS):
        return {"kind": "post", "post": frame}
    try:
        message = read_json(expanded(frame))
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict) and isinstance(message.get("kind"), str):
        return message
    tally.malformed += 1
    return None


def listen_limited(
    context: zmq.Context[zmq.Socket[bytes]], token: str, address: str, port: int
) -> tuple[zmq.Socket[bytes], Listener]:
    """Return a hub's socket, and the listener in front of it, which limits unauthenticated connections.

    The port is reserved, and connections are accepted once the listener is started; ``port`` 0 takes a free
    one. Raises ``OSError`` if the address is not available.
    """
    name = f"torchscout-{secrets.token_hex(16)}"
    socket = _SOCKETS.listen(context, token, f"ipc://@{name}")
    try:
        return socket, Listener((address, port), name, _LIMITS)
    except OSError:
        socket.close()
        raise


class Client:
    """One observer's idle connections to the hub, its standby, and the hubs elected since.

    In a large job they lead through the relay of its machine; see ``relay``.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rank: int,
        token: str,
        hubs: Sequence[Address],
        *,
        relay: Callable[[int | None], str] | None = None,
        poller: zmq.Poller | None = None,
    ) -> None:
        """``relay``: from the place of a hub to where the relay listens for it, or, from None, to where it
        shows that it is there. Sockets are registered at ``poller``."""
        self.tally = Tally()
        self.sockets: list[zmq.Socket[bytes]] = []
        self._hubs, self._relay = hubs, relay
        self._poller = zmq.Poller() if poller is None else poller
        self._connect = partial(connect, context, token, rank)
        self._presence: zmq.Socket[bytes] | None = None
        """The connection that shows whether the relay is there."""
        self._found_relay = False
        self._relayed: set[int] = set()
        """Hubs whose connections lead through the relay."""
        with ExitStack() as undo:
            undo.callback(self.close)
            if relay is not None:
                self._presence = self._connect(relay(None))
            for _ in hubs[:HUBS_AT_FIRST]:
                self.connect_next()
            undo.pop_all()

    def connect_next(self) -> bool:
        """Connect to the next candidate's hub as well; return False if there is none left."""
        place = len(self.sockets)
        if place == len(self._hubs):
            return False
        if self._relay is not None:
            self._relayed.add(place)
        self.sockets.append(self._connect(self._hubs[place] if self._relay is None else self._relay(place)))
        self._poller.register(self.sockets[place], zmq.POLLIN)
        return True

    def go_direct(self, hub: int) -> bool:
        """Connect to a hub without the relay; return False if that is so already."""
        if hub not in self._relayed:
            return False
        direct = self._connect(self._hubs[hub])
        if self._presence is not None:
            with suppress(zmq.Again):  # the relay need not wait for a last report to this hub
                self._presence.send(str(hub).encode(), zmq.NOBLOCK)
        self._poller.unregister(self.sockets[hub])
        self.sockets[hub].close()
        self.sockets[hub] = direct
        self._poller.register(direct, zmq.POLLIN)
        self._relayed.discard(hub)
        return True

    def check_relay(self, *, may_be_starting: bool) -> None:
        """Connect to all hubs directly, now and later, if the relay is lost, or if it is not found though it
        should have started."""
        if self._presence is None:
            return
        if self._presence.poll(0, zmq.POLLOUT):
            self._found_relay = True
        elif self._found_relay or not may_be_starting:
            self._presence.close()
            self._presence = self._relay = None
            for hub in range(len(self.sockets)):
                self.go_direct(hub)

    def is_connected(self, hub: int) -> bool:
        return bool(self.sockets[hub].poll(0, zmq.POLLOUT))

    def connected(self) -> list[bool]:
        return [self.is_connected(hub) for hub in range(len(self.sockets))]

    def send(self, hub: int, kind: str, **fields: Any) -> bool:
        """Return whether the message was sent; a hub that is stopped looks as if it listened."""
        return self._deliver(hub, encode(kind, **fields))

    def post(self, hub: int, kind: str, report: RankReport, number: int = 0) -> bool:
        """Send a report in round ``number``; return whether it was sent."""
        return self._deliver(hub, post_of(report, number, kind))

    def _deliver(self, hub: int, message: bytes) -> bool:
        if len(message) > LIMIT:
            return False
        try:
            self.sockets[hub].send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.tally.sent += 1
        return True

    def receive(self) -> Iterator[tuple[int, Message]]:
        """Yield all messages that have arrived, each with the hub that sent it."""
        for hub, socket in enumerate(self.sockets):
            while socket.poll(0, zmq.POLLIN):
                message = decode(socket.recv(zmq.NOBLOCK), self.tally)
                if message is not None:
                    yield hub, message

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()
        if self._presence is not None:
            self._presence.close()
