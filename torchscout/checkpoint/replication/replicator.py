"""Copies this rank's shards into another machine's memory, in the background (paper, section 8).

One thread sends this rank's shards and receives those that it holds for other ranks. Other threads only queue
requests for it: nothing blocks or raises into training, and a peer that is dead, slow, stopped or wrong is
reported in ``problems``.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import zmq

from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.replication import messages as wire
from torchscout.checkpoint.replication import placement
from torchscout.checkpoint.replication.receiver import ReplicaReceiver, remove
from torchscout.checkpoint.replication.sender import ReplicaSender
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.errors import CheckpointError
from torchscout.log import log
from torchscout.utils.listener_process import ListenerProcess

__all__ = ["Replicator"]

_MAX_PROBLEMS = 100
_BUSY_SECONDS, _IDLE_SECONDS = 0.02, 0.5


class Replicator:
    """Sends one rank's shards to its holder, and holds copies for other ranks."""

    def __init__(
        self,
        rank: int,
        memory: Path,
        token: str,
        *,
        listens: wire.Address = ("127.0.0.1", 0),
        timeout_seconds: float = 30.0,
    ) -> None:
        """Listen at ``listens`` (port 0: any free port); raises ``CheckpointError`` if that fails, and
        ``ValueError`` if the token is too short."""
        self.holder: int | None = None
        self._rank, self._memory, self._token = rank, memory, token
        self._timeout = timeout_seconds
        self._outbox: ReplicaSender | None = None
        self._requests: deque[Callable[[], None]] = deque()
        self._problems: deque[str] = deque(maxlen=_MAX_PROBLEMS)
        self._reported: set[str] = set()
        self._held: frozenset[Generation] = frozenset()
        self._arriving: frozenset[ShardIdentity] = frozenset()
        self._closing = False
        with ExitStack() as undo:
            self._open(listens, undo)
            self._thread = threading.Thread(target=self._run, name="torchscout-replicate", daemon=True)
            self._thread.start()
            undo.pop_all()  # the thread closes them
        self.address: wire.Address = (listens[0], self._listener.port)
        """For other ranks; a host that means all interfaces must be replaced by a reachable one."""

    def connect(self, addresses: Sequence[wire.Address], hosts: Sequence[str]) -> None:
        """Connect, given every rank's address and host. Call it again when they change."""
        if not len(addresses) == len(hosts) > self._rank:
            raise ValueError(
                f"rank {self._rank} needs an address and a host per rank, got {len(addresses)}, {len(hosts)}"
            )
        self.holder = placement.replica_holders(hosts)[self._rank]
        owners = frozenset(placement.held_ranks(hosts, self._rank))
        address = None if self.holder is None else (addresses[self.holder][0], addresses[self.holder][1])
        self._request(lambda: self._connect(self.holder, address, owners))

    def send(self, path: Path, over: Callable[[bool], None] = lambda _: None) -> None:
        """Copy this sealed file, in place of one that is still waiting to be sent.

        The file must not change until ``over`` is called, on the replicator's thread, with whether it was
        copied.
        """
        self._request(lambda: over(False) if self._outbox is None else self._outbox.put(path, over))

    def retire(self, generations: Iterable[Generation]) -> None:
        """Delete these generations from this rank's memory, and their copies from its holder's."""
        gone = frozenset(generations)
        self._request(lambda: self._retire(gone))

    def held(self) -> frozenset[Generation]:
        """The generations of which this rank's holder has a verified copy."""
        return self._held

    def arriving(self) -> frozenset[ShardIdentity]:
        """The shards that are being received."""
        return self._arriving

    def problems(self) -> list[str]:
        """Return and clear what went wrong; the same problem is reported once until a copy succeeds."""
        said = []
        while self._problems:
            said.append(self._problems.popleft())
        return said

    def close(self, seconds: float = 5.0) -> None:
        """Stop, without finishing copies in progress. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._request(lambda: None)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _open(self, listens: wire.Address, undo: ExitStack) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        undo.callback(self._context.destroy, linger=0)
        self._wake_reader, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        undo.callback(os.close, self._wake_reader)
        undo.callback(os.close, self._wake)
        name = f"torchscout-{secrets.token_hex(16)}"
        try:
            socket = wire.listen(self._context, self._token, f"ipc://@{name}")
            self._listener = ListenerProcess(listens, name)
        except (OSError, zmq.ZMQError) as error:
            raise CheckpointError(f"cannot listen at {listens[0]}:{listens[1]}: {error}") from error
        undo.callback(self._listener.close)
        self._inbox = ReplicaReceiver(socket, self._rank, self._memory, self._timeout)

    def _request(self, request: Callable[[], None]) -> None:
        """Run this on the replicator's thread."""
        self._requests.append(request)
        with suppress(OSError):  # the pipe is full, so the thread will wake up; or it has ended
            os.write(self._wake, b"!")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wait()
                self._turn()
        finally:
            self._end()

    def _wait(self) -> None:
        poller, outbox = zmq.Poller(), self._outbox
        poller.register(self._wake_reader, zmq.POLLIN)
        poller.register(self._inbox.socket, zmq.POLLIN)
        if outbox is not None:
            poller.register(outbox.socket, zmq.POLLIN)
        busy = outbox is not None and outbox.busy
        seconds = min(_BUSY_SECONDS if busy else _IDLE_SECONDS, self._timeout / 4)
        poller.poll(max(1, int(1000 * seconds)))

    def _turn(self) -> None:
        try:
            self._run_requests()
            if (problem := self._listener.restart_if_ended()) is not None:
                self._report([problem])
            for box in (self._inbox, self._outbox):
                if box is not None:
                    box.turn(time.monotonic())
                    self._report(box.problems)
        except (OSError, zmq.ZMQError) as error:
            self._report([f"copying shards to other machines: {error}"])
            time.sleep(_BUSY_SECONDS)  # do not spin on a persistent error
        self._arriving = self._inbox.arriving
        if self._outbox is not None:
            if self._outbox.held - self._held:
                self._reported.clear()
            self._held = self._outbox.held

    def _run_requests(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)
        while self._requests:
            self._requests.popleft()()

    def _connect(self, holder: int | None, address: wire.Address | None, owners: frozenset[int]) -> None:
        self._inbox.owners = owners
        before, self._outbox = self._outbox, None
        if holder is not None and address is not None:
            there = f"rank {holder} ({address[0]}:{address[1]})"
            self._outbox = ReplicaSender(
                lambda: wire.connect(self._context, self._token, self._rank, address), there, self._timeout
            )
        if before is not None:
            if self._outbox is not None and (newest := before.newest) is not None:
                self._outbox.put(newest)
            before.close()

    def _retire(self, generations: frozenset[Generation]) -> None:
        if self._outbox is not None:
            self._outbox.retire(generations)
        remove(self._memory, generations, f"*.held-by-{self._rank}.shard")

    def _report(self, problems: list[str]) -> None:
        """Log and keep new problems, and clear the list."""
        for problem in problems:
            if problem not in self._reported and len(self._reported) < _MAX_PROBLEMS:
                self._reported.add(problem)
                self._problems.append(problem)
                log.error("%s", problem)
        problems.clear()

    def _end(self) -> None:
        if not self._closing:
            self._problems.append("copying shards to other machines has stopped: its thread failed")
        self._held = frozenset()
        if self._outbox is not None:
            self._outbox.close()
        self._inbox.close()
        self._context.destroy(linger=0)
        self._listener.close()
        os.close(self._wake_reader)
