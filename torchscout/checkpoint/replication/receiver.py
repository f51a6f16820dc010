"""Receives copies of other ranks' shards into this rank's memory (paper, section 8).

Runs on the thread of ``Replicator``. Nothing blocks, except verifying a complete shard. Messages are checked
before use: they may be old, damaged or wrong, and are then refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from torchscout.checkpoint.generation import Generation, is_number
from torchscout.checkpoint.replication import messages as wire
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_files import shard_files
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.checkpoint.storage.shards import IncomingShard
from torchscout.errors import CheckpointError, DamagedError

__all__ = ["ReplicaReceiver", "held_for", "remove"]

_LONGEST_NAME = 64


@dataclass(slots=True)
class _Arrival:
    transfer: str
    shard: IncomingShard
    upto: int
    """The credit that was granted to the sender."""
    progressed: float
    """When bytes last arrived."""


class ReplicaReceiver:
    """The holder's end: receives at most one shard from each sender at a time."""

    def __init__(self, socket: zmq.Socket[bytes], rank: int, memory: Path, timeout: float) -> None:
        self.problems: list[str] = []
        self.owners: frozenset[int] | None = None
        """The ranks whose copies are kept here; None, until that is known, accepts any rank of this job."""
        self.socket = socket
        self._rank, self._memory, self._timeout = rank, memory, timeout
        self._arrivals: dict[bytes, _Arrival] = {}

    @property
    def arriving(self) -> frozenset[ShardIdentity]:
        return frozenset(each.shard.identity for each in self._arrivals.values())

    def turn(self, now: float) -> None:
        """Process received messages, and drop transfers that make no progress."""
        for received in wire.receive(self.socket):
            self._process(received, now)
        for sender, arrival in list(self._arrivals.items()):
            if now - arrival.progressed > 2 * self._timeout:
                self._drop(sender)

    def close(self) -> None:
        for sender in list(self._arrivals):
            self._drop(sender)
        self.socket.close()

    def _process(self, received: wire.ReceivedMessage, now: float) -> None:
        try:
            self._dispatch(received, now)
        except (ValueError, CheckpointError) as error:
            self._refuse(received, error)

    def _dispatch(self, received: wire.ReceivedMessage, now: float) -> None:
        sender, message, _ = received
        kind, owner = message["kind"], _rank_of(sender)
        if kind == "offer":
            self._offered(sender, owner, message, now)
        elif kind == "chunk":
            self._append(received, now)
        elif kind == "hello":
            held = held_for(self._memory, owner, self._rank)
            self._answer(sender, "holding", generations=wire.plain(held))
        elif kind == "retire":
            generations = wire.generations_of(message)
            remove(self._memory, generations, f"rank-{owner}-of-*.held-by-{self._rank}.shard")
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
        shard = IncomingShard(self._memory, identity, self._rank, size)
        self._arrivals[sender] = arrival = _Arrival(transfer, shard, 0, now)
        self._grant(sender, arrival)

    def _append(self, received: wire.ReceivedMessage, now: float) -> None:
        sender, message, data = received
        arrival = self._arrivals.get(sender)
        if arrival is None or arrival.transfer != _transfer(message):
            raise ValueError("no such transfer is in progress")
        shard, offset = arrival.shard, message.get("offset")
        if offset != shard.received or not 0 < len(data) <= arrival.upto - shard.received:
            raise DamagedError(
                f"received {len(data)} bytes at {offset!r:.40}, expected {shard.received} to {arrival.upto}"
            )
        shard.append(data)
        arrival.progressed = now
        if not shard.complete:
            self._grant(sender, arrival)
            return
        del self._arrivals[sender]
        shard.seal()
        self._answer(sender, "sealed", transfer=arrival.transfer)

    def _grant(self, sender: bytes, arrival: _Arrival) -> None:
        """Grant more credit, half a window at a time: see [Note: credit, not pull]."""
        upto = min(arrival.shard.size, arrival.shard.received + wire.WINDOW)
        if upto == arrival.shard.size or upto - arrival.upto >= wire.WINDOW // 2:
            if upto > arrival.upto:
                self._answer(sender, "credit", transfer=arrival.transfer, upto=upto)
            arrival.upto = upto

    def _refuse(self, received: wire.ReceivedMessage, error: Exception) -> None:
        sender, transfer = received.sender, received.message.get("transfer")
        arrival = self._arrivals.get(sender)
        if arrival is not None and transfer == arrival.transfer:
            self._drop(sender)
        if isinstance(error, CheckpointError):
            self.problems.append(f"a copy from rank {sender!r:.20} was refused: {error}")
        if isinstance(transfer, str):
            self._answer(sender, "refused", transfer=transfer[:_LONGEST_NAME], why=str(error)[:300])

    def _drop(self, sender: bytes) -> None:
        arrival = self._arrivals.pop(sender, None)
        if arrival is not None:
            arrival.shard.discard()

    def _answer(self, sender: bytes, kind: str, **fields: Any) -> None:
        try:
            self.socket.send_multipart([sender, wire.encode(kind, **fields)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # it is gone, or its queue is full; it will ask again


def held_for(memory: Path, owner: int, holder: int) -> frozenset[Generation]:
    """The generations of which ``holder`` has a copy of this rank's state; only headers are checked."""
    copies = [each.path for each in shard_files(memory) if (each.rank, each.holder) == (owner, holder)]
    return frozenset(each for each in map(_generation_in, copies) if each is not None)


def _generation_in(path: Path) -> Generation | None:
    try:
        return shards.inspect(path).identity.generation
    except CheckpointError:  # reported when it is needed
        return None


def remove(memory: Path, generations: Iterable[Generation], pattern: str) -> None:
    """Delete the files of these generations that match, and folders that become empty."""
    for step, lineage in generations:
        folder = memory / f"step-{step:010d}.lineage-{lineage}"
        with suppress(FileNotFoundError):  # another rank has just removed it
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or does not exist
            folder.rmdir()


def _rank_of(sender: bytes) -> int:
    if not (sender.isdigit() and len(sender) < 10):
        raise ValueError(f"not a rank: {sender!r:.40}")
    return int(sender)


def _transfer(message: dict[str, Any]) -> str:
    transfer = message.get("transfer")
    if not isinstance(transfer, str) or not 0 < len(transfer) <= _LONGEST_NAME:
        raise ValueError(f"not the name of a transfer: {transfer!r:.40}")
    return transfer
