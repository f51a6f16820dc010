"""Receives copies of other ranks' shards into this rank's memory (paper, section 8).

Runs on the thread of ``ReplicationEngine``, and nothing blocks; a stream on its own thread receives and
verifies the bytes. Messages are checked before use: they may be old, damaged or wrong, and are then refused.
"""

from __future__ import annotations

import socket as sockets
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from torchscout.checkpoint.gate import Generation, is_number
from torchscout.checkpoint.replication import messages as wire
from torchscout.checkpoint.replication.streams import IncomingStream, Secret
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.incoming import IncomingShard
from torchscout.checkpoint.storage.shard_files import ShardFile, remove_shards, shard_files
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.checkpoint.storage.spare_file import SpareFile
from torchscout.errors import CheckpointError, ScoutError

__all__ = ["ReplicaReceiver", "held_for", "remove_copies"]

_LONGEST_NAME = 64


@dataclass(eq=False, slots=True)
class _Arrival:
    transfer: str
    shard: IncomingShard
    secret: Secret
    progressed: float
    """When bytes last arrived."""
    stream: IncomingStream | None = None
    """Set when its connection has come."""
    received: int = 0


class ReplicaReceiver:
    """The holder's end: receives at most one shard from each sender at a time."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        rank: int,
        memory: Path,
        timeout: float,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``wake`` is called on another thread when ``turn`` has something to do."""
        self.problems: list[str] = []
        self.owners: frozenset[int] | None = None
        """The ranks whose copies are kept here; None, until that is known, accepts any rank of this job."""
        self.socket = socket
        self._rank, self._memory, self._timeout, self._wake = rank, memory, timeout, wake
        self._arrivals: dict[bytes, _Arrival] = {}
        self._tickets: dict[bytes, _Arrival] = {}
        """Those that no connection has presented yet."""
        self._admitted: deque[tuple[_Arrival, sockets.socket]] = deque()
        self._ending: list[_Arrival] = []
        """Given up, while their streams may still use the shard."""
        self._spares: dict[int, SpareFile] = {}
        """By owner."""

    @property
    def arriving(self) -> frozenset[ShardIdentity]:
        return frozenset(each.shard.identity for each in self._arrivals.values())

    def admit(self, ticket: bytes, connection: sockets.socket) -> bool:
        """Take over a connection that presents a valid ticket, which is then used up. For any thread."""
        arrival = self._tickets.pop(ticket, None)
        if arrival is None:
            return False
        self._admitted.append((arrival, connection))
        self._wake()
        return True

    def turn(self, now: float) -> None:
        """Process received messages, and drop transfers that make no progress."""
        for received in wire.receive(self.socket):
            self._process(received, now)
        self._begin_streams()
        for sender, arrival in list(self._arrivals.items()):
            self._watch(sender, arrival, now)
        self._clear()

    def retire(self, generations: frozenset[Generation], owner: int | None = None) -> None:
        """Delete copies of these generations, of one rank or of all.

        One file for each rank is kept for its next copy: the budget has room for one that arrives.
        """
        for each in _copies(self._memory, generations, self._rank, owner):
            if each.rank not in self._spares and all(other.rank != each.rank for other in self.arriving):
                with suppress(OSError):  # somebody reads it, or it is gone
                    self._spares[each.rank] = SpareFile(each.path, self._memory)
        remove_copies(self._memory, generations, self._rank, owner)

    def close(self) -> None:
        for sender in list(self._arrivals):
            self._drop(sender)
        self._begin_streams()
        for arrival in self._ending:
            if arrival.stream is not None:
                arrival.stream.join(1.0)
        self._clear()
        for spare in self._spares.values():
            spare.discard()
        self.socket.close()

    def _begin_streams(self) -> None:
        while self._admitted:
            arrival, connection = self._admitted.popleft()
            if arrival not in self._arrivals.values():  # given up meanwhile
                connection.close()
                continue
            arrival.stream = IncomingStream(connection, arrival.secret.key, arrival.shard, self._wake)
            arrival.stream.start()

    def _watch(self, sender: bytes, arrival: _Arrival, now: float) -> None:
        stream = arrival.stream
        if stream is not None and stream.ended:
            self._finish(sender, arrival, stream)
        elif stream is not None and stream.moved > arrival.received:
            arrival.received, arrival.progressed = stream.moved, now
        elif now - arrival.progressed > self._patience(arrival):
            self._drop(sender)

    def _patience(self, arrival: _Arrival) -> float:
        verifies = arrival.received == arrival.shard.size  # which has no limit but the disk's speed
        return float("inf") if verifies else 2 * self._timeout

    def _finish(self, sender: bytes, arrival: _Arrival, stream: IncomingStream) -> None:
        try:
            if not stream.succeeded:
                raise stream.error or CheckpointError("the transfer failed")
            del self._arrivals[sender]
            arrival.shard.publish()
        except OSError:  # the connection ended; the sender has noticed
            self._drop(sender)
        except ScoutError as error:
            self._drop(sender)
            self._report(sender, arrival.transfer, error)
        else:
            self._answer(sender, "sealed", transfer=arrival.transfer)

    def _process(self, received: wire.ReceivedMessage, now: float) -> None:
        try:
            self._dispatch(received, now)
        except (ValueError, CheckpointError) as error:
            self._refuse(received, error)

    def _dispatch(self, received: wire.ReceivedMessage, now: float) -> None:
        sender, message = received
        kind, owner = message["kind"], _rank_of(sender)
        if kind == "offer":
            self._offered(sender, owner, message, now)
        elif kind == "hello":
            held = held_for(self._memory, owner, self._rank)
            self._answer(sender, "holding", generations=wire.plain(held))
        elif kind == "retire":
            generations = wire.generations_of(message)
            self.retire(generations, owner)
            self._answer(sender, "retired", generations=wire.plain(generations))

    def _offered(self, sender: bytes, owner: int, message: dict[str, Any], now: float) -> None:
        self._drop(sender)  # the sender has given up its previous transfer
        identity, size = ShardIdentity.from_json(message.get("identity")), message.get("size")
        transfer = _transfer(message)
        if identity.rank != owner:
            raise ValueError(f"rank {owner} offers the state of rank {identity.rank}")
        if self.owners is not None and owner not in self.owners:
            raise ValueError(f"rank {self._rank} does not hold copies for rank {owner}")
        if not isinstance(size, int) or not is_number(size, 1):
            raise ValueError(f"not the size of a shard: {size!r:.40}")
        shard = IncomingShard(self._memory, identity, self._rank, size, self._spares.pop(owner, None))
        arrival = _Arrival(transfer, shard, Secret.new(), now)
        self._arrivals[sender] = self._tickets[arrival.secret.ticket] = arrival
        self._answer(sender, "ready", transfer=transfer, secret=arrival.secret.to_json())

    def _refuse(self, received: wire.ReceivedMessage, error: Exception) -> None:
        sender, transfer = received.sender, received.message.get("transfer")
        if isinstance(transfer, str):
            self._report(sender, transfer[:_LONGEST_NAME], error)

    def _report(self, sender: bytes, transfer: str, error: Exception) -> None:
        if isinstance(error, CheckpointError):
            self.problems.append(f"a copy from rank {sender!r:.20} was refused: {error}")
        self._answer(sender, "refused", transfer=transfer, why=str(error)[:300])

    def _drop(self, sender: bytes) -> None:
        """Give up what this sender's transfer has brought."""
        arrival = self._arrivals.pop(sender, None)
        if arrival is None:
            return
        self._tickets.pop(arrival.secret.ticket, None)
        if arrival.stream is not None:
            arrival.stream.abort()
        self._ending.append(arrival)
        self._clear()

    def _clear(self) -> None:
        """Remove what was given up, as soon as no thread writes to it."""
        over = [each for each in self._ending if each.stream is None or each.stream.ended]
        for arrival in over:
            arrival.shard.discard()
            self._ending.remove(arrival)

    def _answer(self, sender: bytes, kind: str, **fields: Any) -> None:
        try:
            self.socket.send_multipart([sender, wire.encode(kind, **fields)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # it is gone, or its queue is full; it will ask again


def held_for(memory: Path, owner: int, holder: int) -> frozenset[Generation]:
    """The generations of which ``holder`` has a copy of this rank's state; only headers are checked."""
    copies = [each.path for each in shard_files(memory, owner=owner, holder=holder)]
    return frozenset(each for each in map(_generation_in, copies) if each is not None)


def _generation_in(path: Path) -> Generation | None:
    try:
        return shards.inspect(path).identity.generation
    except CheckpointError:  # reported when it is needed
        return None


def remove_copies(
    memory: Path, generations: Iterable[Generation], holder: int, owner: int | None = None
) -> None:
    """Delete the copies of these generations that ``holder`` keeps for other ranks, or for one of them."""
    with suppress(CheckpointError):  # another try follows with the next generation that is retired
        remove_shards(_copies(memory, frozenset(generations), holder, owner))


def _copies(
    memory: Path, generations: frozenset[Generation], holder: int, owner: int | None
) -> list[ShardFile]:
    if not memory.is_dir():
        return []
    found = shard_files(memory, generations.__contains__, owner=owner, holder=holder)
    return [each for each in found if each.is_replica]


def _rank_of(sender: bytes) -> int:
    if not (sender.isdigit() and len(sender) < 10):
        raise ValueError(f"not a rank: {sender!r:.40}")
    return int(sender)


def _transfer(message: dict[str, Any]) -> str:
    transfer = message.get("transfer")
    if not isinstance(transfer, str) or not 0 < len(transfer) <= _LONGEST_NAME:
        raise ValueError(f"not the name of a transfer: {transfer!r:.40}")
    return transfer
