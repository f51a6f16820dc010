"""The messages and sockets by which ranks copy shards to each other (paper, section 8).

A message is a small JSON object, followed by raw bytes for a piece of a shard: data, never code. Nothing
blocks: what cannot be sent now is not sent, and malformed messages are dropped.

    from the owner of a shard       from its holder
    hello                           holding   generations
    offer    transfer identity size credit    transfer upto
    chunk    transfer offset, bytes sealed    transfer
                                    refused   transfer why
    retire   generations            retired   generations

[Note: credit, not pull]

The holder grants credit for a window of bytes ahead, and the owner sends chunks up to it. If the holder
requested each chunk instead, the messages would be the same but for their names, and each chunk would wait
for a round trip unless several requests were outstanding: then their number would be the window. Either way
the owner knows first that a shard exists, so it speaks first, and both ends need timeouts, because either may
be gone. Credit bounds the memory that unread chunks take at the holder and keeps the connection busy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import zmq

from torchscout.checkpoint.generation import Generation
from torchscout.utils.network import Address, CurveSockets, encode

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
"""The maximum number of a shard's bytes in one message."""
WINDOW = 4 * CHUNK
"""The maximum number of bytes in flight to a holder: see [Note: credit, not pull]."""
_SLACK = 1 << 16
_SOCKETS = CurveSockets("replica 2", CHUNK + _SLACK)
listen, connect = _SOCKETS.listen, _SOCKETS.connect


class ReceivedMessage(NamedTuple):
    sender: bytes
    """The owner's rank; empty at the owner's end."""
    message: dict[str, Any]
    data: memoryview
    """The raw bytes; empty for most messages."""


def receive(socket: zmq.Socket[bytes], most: int = 64) -> Iterator[ReceivedMessage]:
    """Yield the valid ones of up to ``most`` received messages; the caller may close the socket meanwhile."""
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
    """The generations in a message; raises ``ValueError`` if they are malformed."""
    named = message.get("generations")
    if not isinstance(named, list):
        raise ValueError(f"not a list of generations: {named!r:.80}")
    return frozenset(map(Generation.from_json, named))


def plain(generations: Iterable[Generation]) -> list[list[int]]:
    """Generations as JSON."""
    return [list(each) for each in sorted(generations)]


def _decoded(frame: memoryview) -> dict[str, Any] | None:
    if len(frame) > _SLACK:
        return None
    try:
        message = json.loads(bytes(frame))
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None
