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
"""Bytes of a shard in one message at most."""
WINDOW = 4 * CHUNK
"""Bytes that may be on their way to a holder which has not taken them yet."""
_SLACK = 1 << 16
_SOCKETS = CurveSockets("replica 2", CHUNK + _SLACK)
listen, connect = _SOCKETS.listen, _SOCKETS.connect


class ReceivedMessage(NamedTuple):
    sender: bytes
    """Empty at the owner's end, which has one holder."""
    message: dict[str, Any]
    data: memoryview
    """What came along; empty for most."""


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
