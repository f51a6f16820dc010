"""A copy of this rank's state in another machine's memory, made in the background (paper, section 8).

One thread of its own does all the work, for what this rank sends and for what it holds for others. Training
only leaves word with it: nothing here waits or raises into training, and a peer that is dead, slow, stopped
or wrong is a sentence in ``problems``. Which generations there are, and which may go, is decided elsewhere.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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

_KEPT_PROBLEMS = 100
_BUSY_SECONDS, _IDLE_SECONDS = 0.02, 0.5


class Replicator:
    """One rank's share in copying: sends to its holder, and holds for its wards."""

    def __init__(
        self,
        rank: int,
        memory: Path,
        token: str,
        *,
        listens: wire.Address = ("127.0.0.1", 0),
        timeout_seconds: float = 30.0,
    ) -> None:
        """``listens`` where wards reach this rank (port 0: any); ``CheckpointError`` if it cannot."""
        self.holder: int | None = None
        self._rank, self._memory, self._token = rank, memory, token
        self._patience = timeout_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        name = f"torchscout-{secrets.token_hex(16)}"
        try:
            socket = wire.listen(self._context, token, f"ipc://@{name}")
            self._listener = ListenerProcess(listens, name)
        except (OSError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            raise CheckpointError(f"cannot listen at {listens[0]}:{listens[1]}: {error}") from error
        self.address: wire.Address = (listens[0], self._listener.port)
        """For the other ranks; a host that stands for every interface must be replaced by a real one."""
        self._inbox = ReplicaReceiver(socket, rank, memory, timeout_seconds)
        self._outbox: ReplicaSender | None = None
        self._words: deque[Callable[[], None]] = deque()
        self._problems: deque[str] = deque(maxlen=_KEPT_PROBLEMS)
        self._told: set[str] = set()
        self._held: frozenset[Generation] = frozenset()
        self._arriving: frozenset[ShardIdentity] = frozenset()
        self._closing = False
        self._bell_out, self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="torchscout-replicate", daemon=True)
        self._thread.start()

    def connect(self, addresses: Sequence[wire.Address], hosts: Sequence[str]) -> None:
        """Given every rank's address and host; again when they have changed."""
        if not len(addresses) == len(hosts) > self._rank:
            raise ValueError(
                f"{len(addresses)} addresses and {len(hosts)} hosts, and this is rank {self._rank}"
            )
        self.holder = placement.replica_holders(hosts)[self._rank]
        wards = frozenset(placement.held_ranks(hosts, self._rank))
        address = None if self.holder is None else (addresses[self.holder][0], addresses[self.holder][1])
        self._leave_word(lambda: self._connected(self.holder, address, wards))

    def send(self, path: Path, over: Callable[[bool], None] = lambda _: None) -> None:
        """Copy this sealed file; one that waits to be sent is given up for it.

        ``over`` is called, on a thread of ours, with whether the file was copied or is given up: until then
        it must stay.
        """
        self._leave_word(lambda: over(False) if self._outbox is None else self._outbox.put(path, over))

    def retire(self, generations: Iterable[Generation]) -> None:
        """Delete what this rank keeps of them in memory, and have its holder do the same with its copies."""
        gone = frozenset(generations)
        self._leave_word(lambda: self._retired(gone))

    def held(self) -> frozenset[Generation]:
        """The generations of this rank's state that its holder has verified and keeps."""
        return self._held

    def arriving(self) -> frozenset[ShardIdentity]:
        """Whose state is on its way here, for which generation."""
        return self._arriving

    def problems(self) -> list[str]:
        """What went wrong since the last call, in words; what lasts is said once until a copy succeeds."""
        said = []
        while self._problems:
            said.append(self._problems.popleft())
        return said

    def close(self, seconds: float = 5.0) -> None:
        """Stop; what is not copied by now is not copied. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._leave_word(lambda: None)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            os.close(self._bell)

    def _leave_word(self, word: Callable[[], None]) -> None:
        self._words.append(word)
        try:
            os.write(self._bell, b"!")
        except OSError:  # it rings already, or nobody is there to hear it
            return

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wait()
                self._turn()
        finally:
            self._end()

    def _wait(self) -> None:
        poller, outbox = zmq.Poller(), self._outbox
        poller.register(self._bell_out, zmq.POLLIN)
        poller.register(self._inbox.socket, zmq.POLLIN)
        if outbox is not None:
            poller.register(outbox.socket, zmq.POLLIN)
        busy = outbox is not None and outbox.busy
        seconds = min(_BUSY_SECONDS if busy else _IDLE_SECONDS, self._patience / 4)
        poller.poll(max(1, int(1000 * seconds)))

    def _turn(self) -> None:
        try:
            self._hear_words()
            if (problem := self._listener.restart_if_ended()) is not None:
                self._tell([problem])
            for box in (self._inbox, self._outbox):
                if box is not None:
                    box.turn(time.monotonic())
                    self._tell(box.problems)
        except (OSError, zmq.ZMQError) as error:
            self._tell([f"copying among ranks: {error}"])
            time.sleep(_BUSY_SECONDS)  # what fails at once, fails often
        self._arriving = self._inbox.arriving
        if self._outbox is not None:
            if self._outbox.held - self._held:
                self._told.clear()
            self._held = self._outbox.held

    def _hear_words(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._bell_out, 4096)
        while self._words:
            self._words.popleft()()

    def _connected(self, holder: int | None, address: wire.Address | None, wards: frozenset[int]) -> None:
        self._inbox.wards = wards
        before, self._outbox = self._outbox, None
        if holder is not None and address is not None:
            there = f"rank {holder} ({address[0]}:{address[1]})"
            self._outbox = ReplicaSender(
                lambda: wire.connect(self._context, self._token, self._rank, address), there, self._patience
            )
        if before is not None:
            if self._outbox is not None and (newest := before.newest) is not None:
                self._outbox.put(newest)
            before.close()

    def _retired(self, generations: frozenset[Generation]) -> None:
        if self._outbox is not None:
            self._outbox.retire(generations)
        remove(self._memory, generations, f"*.held-by-{self._rank}.shard")

    def _tell(self, problems: list[str]) -> None:
        said, problems[:] = list(problems), []
        for problem in said:
            if problem not in self._told and len(self._told) < _KEPT_PROBLEMS:
                self._told.add(problem)
                self._problems.append(problem)
                log.error("%s", problem)

    def _end(self) -> None:
        if not self._closing:
            self._problems.append("copying among ranks has ended: its thread failed")
        self._held = frozenset()
        if self._outbox is not None:
            self._outbox.close()
        self._inbox.close()
        self._context.destroy(linger=0)
        self._listener.close()
        os.close(self._bell_out)
