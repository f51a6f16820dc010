"""Copies of other ranks' state on their way into this rank's memory (paper, section 8).

Driven by one thread, which is not training's: see ``replicate``. Nothing here waits, but for the verifying
of a shard that is complete. What a sender says is checked before it is believed: it may be old, damaged or
wrong, and all that may come of it is a refusal.
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
    """What the sender was told that there is room for."""
    heard: float


class ReplicaReceiver:
    """The holder's end: at most one shard under way from each sender."""

    def __init__(self, socket: zmq.Socket[bytes], rank: int, memory: Path, patience: float) -> None:
        self.problems: list[str] = []
        self.wards: frozenset[int] | None = None
        """Whose copies are kept here; None until that is known, and then anybody's of this job."""
        self.socket = socket
        self._rank, self._memory, self._patience = rank, memory, patience
        self._arrivals: dict[bytes, _Arrival] = {}

    @property
    def arriving(self) -> frozenset[ShardIdentity]:
        return frozenset(each.shard.identity for each in self._arrivals.values())

    def turn(self, now: float) -> None:
        """Take what has come, and forget whom nothing comes from any more."""
        for heard in wire.receive(self.socket):
            self._take(heard, now)
        for sender, arrival in list(self._arrivals.items()):
            if now - arrival.heard > 2 * self._patience:
                self._forget(sender)

    def close(self) -> None:
        for sender in list(self._arrivals):
            self._forget(sender)
        self.socket.close()

    def _take(self, heard: wire.ReceivedMessage, now: float) -> None:
        try:
            self._hear(heard, now)
        except (ValueError, CheckpointError) as error:
            self._refuse(heard, error)

    def _hear(self, heard: wire.ReceivedMessage, now: float) -> None:
        kind, message = heard.message["kind"], heard.message
        ward = _ward(heard.sender)
        if kind == "offer":
            self._offered(heard.sender, ward, message, now)
        elif kind == "chunk":
            self._came(heard, now)
        elif kind == "hello":
            there = held_for(self._memory, ward, self._rank)
            self._answer(heard.sender, "holding", generations=wire.plain(there))
        elif kind == "retire":
            gone = wire.generations_of(message)
            remove(self._memory, gone, f"rank-{ward}-of-*.held-by-{self._rank}.shard")
            self._answer(heard.sender, "retired", generations=wire.plain(gone))

    def _offered(self, sender: bytes, ward: int, message: dict[str, Any], now: float) -> None:
        self._forget(sender)  # who begins anew has given up what was under way
        identity, size, transfer = (
            ShardIdentity.from_json(message.get("identity")),
            message.get("size"),
            _transfer(message),
        )
        if identity.rank != ward:
            raise ValueError(f"rank {ward} offers the state of rank {identity.rank}")
        if self.wards is not None and ward not in self.wards:
            raise ValueError(f"rank {self._rank} does not hold copies for rank {ward}")
        if not isinstance(size, int) or not is_number(size, 1):
            raise ValueError(f"no size of a shard: {size!r:.40}")
        shard = IncomingShard(self._memory, identity, self._rank, size)
        self._arrivals[sender] = arrival = _Arrival(transfer, shard, 0, now)
        self._grant(sender, arrival)

    def _came(self, heard: wire.ReceivedMessage, now: float) -> None:
        arrival, message = self._arrivals.get(heard.sender), heard.message
        if arrival is None or arrival.transfer != _transfer(message):
            raise ValueError("nothing of that kind is expected here")
        shard, offset = arrival.shard, message.get("offset")
        if offset != shard.received or not 0 < len(heard.data) <= arrival.upto - shard.received:
            raise DamagedError(
                f"{len(heard.data)} bytes for {offset!r:.40}, where bytes {shard.received} to {arrival.upto} "
                "are expected"
            )
        shard.append(heard.data)
        arrival.heard = now
        if not shard.complete:
            self._grant(heard.sender, arrival)
            return
        del self._arrivals[heard.sender]
        shard.seal()
        self._answer(heard.sender, "sealed", transfer=arrival.transfer)

    def _grant(self, sender: bytes, arrival: _Arrival) -> None:
        """Room for more, half a window at a time."""
        upto = min(arrival.shard.size, arrival.shard.received + wire.WINDOW)
        if upto == arrival.shard.size or upto - arrival.upto >= wire.WINDOW // 2:
            if upto > arrival.upto:
                self._answer(sender, "credit", transfer=arrival.transfer, upto=upto)
            arrival.upto = upto

    def _refuse(self, heard: wire.ReceivedMessage, error: Exception) -> None:
        transfer = heard.message.get("transfer")
        arrival = self._arrivals.get(heard.sender)
        if arrival is not None and transfer == arrival.transfer:
            self._forget(heard.sender)
        if isinstance(error, CheckpointError):
            self.problems.append(f"a copy from rank {heard.sender!r:.20} was refused: {error}")
        if isinstance(transfer, str):
            self._answer(heard.sender, "refused", transfer=transfer[:_LONGEST_NAME], why=str(error)[:300])

    def _forget(self, sender: bytes) -> None:
        arrival = self._arrivals.pop(sender, None)
        if arrival is not None:
            arrival.shard.discard()

    def _answer(self, sender: bytes, kind: str, **fields: Any) -> None:
        try:
            self.socket.send_multipart([sender, wire.encode(kind, **fields)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # it is gone, or takes nothing; it will ask again, or nobody will


def held_for(memory: Path, ward: int, holder: int) -> frozenset[Generation]:
    """Of which generations ``holder`` has a copy of this rank's state here, as far as headers tell."""
    copies = [each.path for each in shard_files(memory) if (each.rank, each.holder) == (ward, holder)]
    return frozenset(each for each in map(_generation_in, copies) if each is not None)


def _generation_in(path: Path) -> Generation | None:
    try:
        return shards.inspect(path).identity.generation
    except CheckpointError:  # whoever needs it will say so
        return None


def remove(memory: Path, generations: Iterable[Generation], pattern: str) -> None:
    """Delete files of these generations, and their folders once nothing is left in them."""
    for step, lineage in generations:
        folder = memory / f"step-{step:010d}.lineage-{lineage}"
        with suppress(FileNotFoundError):  # another rank has just removed it
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # others' files are in it, or it never was
            folder.rmdir()


def _ward(sender: bytes) -> int:
    if not (sender.isdigit() and len(sender) < 10):
        raise ValueError(f"not a rank: {sender!r:.40}")
    return int(sender)


def _transfer(message: dict[str, Any]) -> str:
    transfer = message.get("transfer")
    if not isinstance(transfer, str) or not 0 < len(transfer) <= _LONGEST_NAME:
        raise ValueError(f"no name of a transfer: {transfer!r:.40}")
    return transfer
