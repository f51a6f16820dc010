"""The messages by which ranks arrange to copy shards to each other (paper, section 8).

A message is a small JSON object: data, never code. Nothing blocks: what cannot be sent now is not sent, and
malformed messages are dropped. CURVE encrypts and authenticates them. The bytes of a shard take a connection
of their own, with the secret that the holder sends: see ``streams``.

    from the owner of a shard       from its holder
    hello                           holding   generations
    offer    transfer identity size ready     transfer secret
                                    sealed    transfer
                                    refused   transfer why
    retire   generations            retired   generations
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import zmq

from torchscout.checkpoint.gate import Generation
from torchscout.utils.network import Address, CurveSockets, encode

__all__ = [
    "Address",
    "ReceivedMessage",
    "connect",
    "encode",
    "generations_of",
    "listen",
    "plain",
    "receive",
]

_LARGEST = 1 << 16
_SOCKETS = CurveSockets("replica 3", 4 * _LARGEST)
listen, connect = _SOCKETS.listen, _SOCKETS.connect


class ReceivedMessage(NamedTuple):
    sender: bytes
    """The owner's rank; empty at the owner's end."""
    message: dict[str, Any]


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
        if len(frames) == 1 and (message := _decoded(frames[0].buffer)) is not None:
            yield ReceivedMessage(sender, message)


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
    if len(frame) > _LARGEST:
        return None
    try:
        message = json.loads(bytes(frame))
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None
