"""What ranks say to each other about copies of their state, and over which sockets (paper, section 8).

A message is a small JSON object, and for a piece of a shard its raw bytes: data, never code. Nothing here
waits: what cannot be sent now is not sent, and what is malformed is dropped.

    from the owner of a shard       from its holder
    hello                           holding   generations
    offer    transfer identity size credit    transfer upto
    chunk    transfer offset, bytes sealed    transfer
                                    refused   transfer why
    retire   generations            retired   generations
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import zmq

from torchscout.checkpoint.generation import Generation
from torchscout.utils import network

__all__ = [
    "CHUNK",
    "WINDOW",
    "Address",
    "ReceivedMessage",
    "connect",
    "encode",
    "generations_of",
    "listen",
    "plain",
    "receive",
]

CHUNK = 4 << 20
"""Bytes of a shard in one message at most."""
WINDOW = 4 * CHUNK
"""Bytes that may be on their way to a holder which has not taken them yet."""
_SLACK = 1 << 16
_HANDSHAKE_MS = 5000
_RECONNECT_MS, _RECONNECT_MOST_MS = 100, 2000
_FLUSH_MS = 200
_PURPOSE = "replica"

Address = tuple[str, int]
"""Host and port."""


class ReceivedMessage(NamedTuple):
    sender: bytes
    """Empty at the owner's end, which has one holder."""
    message: dict[str, Any]
    data: memoryview
    """What came along; empty for most."""


def encode(kind: str, **fields: Any) -> bytes:
    return json.dumps({"kind": kind, **fields}, separators=(",", ":"), allow_nan=False).encode()


def listen(context: zmq.Context[zmq.Socket[bytes]], token: str, endpoint: str) -> zmq.Socket[bytes]:
    """A holder's end."""
    socket = _socket(context, zmq.ROUTER)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = network.derive(token, _PURPOSE, "holder")
    socket.router_mandatory = True  # to learn at once who is not connected
    socket.router_handover = True  # an owner that connects anew replaces its lost connection
    if endpoint.startswith("ipc:"):
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
    socket.bind(endpoint)
    return socket


def connect(
    context: zmq.Context[zmq.Socket[bytes]], token: str, rank: int, address: Address
) -> zmq.Socket[bytes]:
    """An owner's end."""
    socket = _socket(context, zmq.DEALER)
    socket.curve_serverkey = network.derive(token, _PURPOSE, "holder").public
    socket.curve_publickey, socket.curve_secretkey = network.derive(token, _PURPOSE, "owner")
    socket.routing_id = str(rank).encode()
    socket.immediate = True  # nothing is queued for a holder that is not there
    socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS, _RECONNECT_MOST_MS
    host, port = address
    socket.connect(f"tcp://{_bracketed(host)}:{port}")
    return socket


def receive(socket: zmq.Socket[bytes], most: int = 64) -> Iterator[ReceivedMessage]:
    """What has arrived and makes sense, of ``most`` messages; the caller may close the socket meanwhile."""
    for _ in range(most):
        if socket.closed:
            return
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        sender = frames.pop(0).bytes if socket.type == zmq.ROUTER else b""
        if len(frames) in (1, 2) and (message := _decoded(frames[0].buffer)) is not None:
            yield ReceivedMessage(sender, message, frames[1].buffer if len(frames) == 2 else memoryview(b""))


def generations_of(message: Mapping[str, Any]) -> frozenset[Generation]:
    """Those that a message names; ``ValueError`` if it names none properly."""
    named = message.get("generations")
    if not isinstance(named, list):
        raise ValueError(f"not a list of generations: {named!r:.80}")
    return frozenset(map(Generation.from_json, named))


def plain(generations: Iterable[Generation]) -> list[list[int]]:
    """For JSON."""
    return [list(each) for each in sorted(generations)]


def _decoded(frame: memoryview) -> dict[str, Any] | None:
    if len(frame) > _SLACK:
        return None
    try:
        message = json.loads(bytes(frame))
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.ipv6 = True
    socket.linger = _FLUSH_MS
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.maxmsgsize = CHUNK + _SLACK  # whoever sends more is disconnected
    return socket


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
