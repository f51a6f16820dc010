"""Sends one rank's shards and receives those that it holds for other ranks (paper, section 8).

Runs in a process of its own beside the trainer: see ``process``. Its one thread arranges transfers, and each
transfer has a thread that moves bytes. A peer that is dead, slow, stopped or wrong is reported in
``problems``.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import zmq

from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.replication import messages as wire
from torchscout.checkpoint.replication.receiver import ReplicaReceiver
from torchscout.checkpoint.replication.sender import ReplicaSender
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.checkpoint.totals import Totals
from torchscout.errors import CheckpointError
from torchscout.utils import aes_gcm
from torchscout.utils.listener import Listener

__all__ = ["ReplicationEngine"]

_MAX_PROBLEMS = 100
_BUSY_SECONDS, _IDLE_SECONDS = 0.05, 0.5


class ReplicationEngine:
    """Call ``wait`` and ``turn`` in a loop, and the other methods on the same thread."""

    def __init__(
        self, rank: int, memory: Path, token: str, listens: wire.Address, timeout_seconds: float
    ) -> None:
        """Listen at ``listens`` (port 0: any free port); raises ``CheckpointError`` if that fails,
        ``ScoutError`` without AES, and ``ValueError`` if the token is too short."""
        self.problems: list[str] = []
        """New ones; the same problem is reported once until a copy succeeds."""
        self._rank, self._token, self._timeout = rank, token, timeout_seconds
        self._outbox: ReplicaSender | None = None
        self._rate: int | None = None
        self._reported: set[str] = set()
        self._known: frozenset[Generation] = frozenset()
        aes_gcm.load()
        shards.clean(memory)  # what a killed process has left, so that the memory budget holds
        with ExitStack() as undo:
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(self._context.destroy, linger=0)
            self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, self._wake_reader)
            undo.callback(os.close, self._wake_writer)
            name = f"torchscout-{secrets.token_hex(16)}"
            try:
                socket = wire.listen(self._context, token, f"ipc://@{name}")
                self._inbox = ReplicaReceiver(socket, rank, memory, timeout_seconds, self._wake)
                self._listener = Listener(listens, name, admit=self._inbox.admit)
            except (OSError, zmq.ZMQError) as error:
                why = error.strerror or str(error)
                raise CheckpointError(f"cannot listen at {listens[0]}:{listens[1]}: {why}") from error
            self._listener.start()
            undo.pop_all()

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def held(self) -> frozenset[Generation]:
        """The generations of which this rank's holder has a verified copy."""
        return frozenset() if self._outbox is None else self._outbox.held

    @property
    def totals(self) -> Totals:
        """The copies of this rank's shards that its holder has sealed."""
        return Totals() if self._outbox is None else self._outbox.totals

    @property
    def arriving(self) -> frozenset[ShardIdentity]:
        """The shards that are being received."""
        return self._inbox.arriving

    def connect(self, holder: int | None, address: wire.Address | None, owners: frozenset[int]) -> None:
        """Send to this rank from now on, and hold copies for ``owners``."""
        self._inbox.owners = owners
        before, self._outbox = self._outbox, None
        if holder is not None and address is not None:
            self._outbox = ReplicaSender(
                lambda: wire.connect(self._context, self._token, self._rank, address),
                address,
                f"rank {holder} ({address[0]}:{address[1]})",
                self._timeout,
                self._wake,
            )
        self.limit(self._rate)
        if before is not None:
            if self._outbox is not None:
                self._outbox.totals = before.totals
            if self._outbox is not None and (newest := before.newest) is not None:
                self._outbox.put(newest)
            before.close()

    def send(self, path: Path, over: Callable[[bool], None]) -> None:
        """Copy this file, in place of one that is still waiting; ``over`` gets whether it was copied."""
        if self._outbox is None:
            over(False)
        else:
            self._outbox.put(path, over)

    def retire(self, generations: frozenset[Generation]) -> None:
        """Delete the copies of these generations that are kept here, and have the holder delete its own."""
        self._inbox.retire(generations)
        if self._outbox is not None:
            self._outbox.retire(generations)

    def limit(self, rate: int | None) -> None:
        """Send no more bytes in a second than this; None: no limit."""
        self._rate = rate
        if self._outbox is not None:
            self._outbox.limit.rate = rate

    def wait(self, *others: int) -> None:
        """Until ``turn`` has something to do, or one of the other descriptors can be read."""
        poller = zmq.Poller()
        for each in (self._wake_reader, *others, self._inbox.socket):
            poller.register(each, zmq.POLLIN)
        if self._outbox is not None:
            poller.register(self._outbox.socket, zmq.POLLIN)
        busy = bool(self.arriving) or (self._outbox is not None and self._outbox.busy)
        seconds = min(_BUSY_SECONDS if busy else _IDLE_SECONDS, self._timeout / 4)
        poller.poll(max(1, int(1000 * seconds)))

    def turn(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)
        try:
            for box in (self._inbox, self._outbox):
                if box is not None:
                    box.turn(time.monotonic())
                    self._report(box.problems)
        except (OSError, zmq.ZMQError) as error:
            self._report([f"copying shards to other machines: {error}"])
            time.sleep(_BUSY_SECONDS)  # do not spin on a persistent error
        if self.held - self._known:
            self._reported.clear()
        self._known = self.held

    def close(self) -> None:
        """Stop, without finishing copies in progress."""
        if self._outbox is not None:
            self._outbox.close()
        self._listener.close()
        self._inbox.close()
        self._context.destroy(linger=0)

    def _wake(self) -> None:
        with suppress(OSError):  # the pipe is full, so ``wait`` will return
            os.write(self._wake_writer, b"!")

    def _report(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._reported and len(self._reported) < _MAX_PROBLEMS:
                self._reported.add(problem)
                self.problems.append(problem)
        problems.clear()
