"""Copies this rank's shards into another machine's memory, in the background (paper, section 8).

A process of its own does the work: see ``process``. In the trainer, one thread passes requests to it and
reads what it reports: nothing blocks or raises into training, and what goes wrong is in ``problems``.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.replication import placement
from torchscout.checkpoint.replication.pace import CopyPace
from torchscout.checkpoint.replication.receiver import remove_copies
from torchscout.checkpoint.replication.replica_process import ReplicaProcess
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.checkpoint.totals import Totals
from torchscout.errors import ScoutError
from torchscout.log import log
from torchscout.utils.listener import Address

__all__ = ["Replicator"]

_MAX_PROBLEMS = 100
_MOST_RESTARTS = 3
_MAX_RETIRED = 100
"""Generations whose copies the process may not have deleted yet."""


class Replicator:
    """Sends one rank's shards to its holder, and holds copies for other ranks."""

    def __init__(
        self,
        rank: int,
        memory: Path,
        token: str,
        *,
        listens: Address = ("127.0.0.1", 0),
        timeout_seconds: float = 30.0,
    ) -> None:
        """Listen at ``listens`` (port 0: any free port); raises ``CheckpointError`` if that fails, and
        ``ValueError`` if the token is too short."""
        self.holder: int | None = None
        self.totals = Totals()
        """The copies of this rank's shards that its holder has sealed."""
        self._totals_before = Totals()
        """Those of processes that have ended."""
        self.restarts = 0
        self._rank, self._memory = rank, memory
        self._setup: dict[str, Any] = {
            "rank": rank,
            "memory": str(memory),
            "token": token,
            "timeout": timeout_seconds,
            "parent": os.getpid(),
        }
        self._requests: deque[Callable[[], None]] = deque()
        self._problems: deque[str] = deque(maxlen=_MAX_PROBLEMS)
        self._connected: dict[str, Any] | None = None
        self._newest: Path | None = None
        self._retired: deque[Generation] = deque(maxlen=_MAX_RETIRED)
        self._waiting: dict[int, Callable[[bool], None]] = {}
        """By number: what to call when a file is no longer needed."""
        self._sends = 0
        self._pace, self._was_sending = CopyPace(), False
        self._held: frozenset[Generation] = frozenset()
        self._arriving: frozenset[ShardIdentity] = frozenset()
        self._closing = False
        self._process: ReplicaProcess | None = ReplicaProcess(self._setup, listens)
        self.address: Address = (listens[0], self._process.port)
        """For other ranks; a host that means all interfaces must be replaced by a reachable one."""
        self._wake_reader, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="torchscout-replicate", daemon=True)
        self._thread.start()

    def connect(self, addresses: Sequence[Address], hosts: Sequence[str]) -> None:
        """Connect, given every rank's address and host. Call it again when they change."""
        if not len(addresses) == len(hosts) > self._rank:
            raise ValueError(
                f"rank {self._rank} needs an address and a host per rank, got {len(addresses)}, {len(hosts)}"
            )
        self.holder = placement.replica_holders(hosts)[self._rank]
        command = {
            "holder": self.holder,
            "address": None if self.holder is None else list(addresses[self.holder]),
            "owners": placement.held_ranks(hosts, self._rank),
        }
        self._request(lambda: self._connect(command))

    def send(self, path: Path, over: Callable[[bool], None] = lambda _: None) -> None:
        """Copy this sealed file, in place of one that is still waiting to be sent.

        The file must not change until ``over`` is called, on the replicator's thread, with whether it was
        copied.
        """
        self._request(lambda: self._send(path, over))

    def retire(self, generations: Iterable[Generation]) -> None:
        """Delete the copies of these generations here and at this rank's holder.

        This rank's own snapshots stay: see ``Snapshots.retire``.
        """
        gone = frozenset(generations)
        self._request(lambda: self._retire(gone))

    def step_took(self, seconds: float) -> None:
        """Adapt the rate of copies to the duration of a step; see ``pace``."""
        is_sending, was_sending = bool(self._waiting), self._was_sending
        self._was_sending = is_sending
        # A step in which a copy began or ended tells nothing about either.
        if is_sending == was_sending and self._pace.step_took(seconds, during_copy=is_sending):
            rate = self._pace.rate
            self._request(lambda: self._command("limit", rate=rate))

    @property
    def rate(self) -> int | None:
        """Bytes in a second that copies are limited to; None if they are not."""
        return self._pace.rate

    def held(self) -> frozenset[Generation]:
        """The generations of which this rank's holder has a verified copy."""
        return self._held

    def arriving(self) -> frozenset[ShardIdentity]:
        """The shards that are being received."""
        return self._arriving

    @property
    def pid(self) -> int | None:
        """The process that makes the copies; None if it ended and is not started again."""
        return None if self._process is None else self._process.pid

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

    def _request(self, request: Callable[[], None]) -> None:
        """Run this on the replicator's thread."""
        self._requests.append(request)
        with suppress(OSError):  # the pipe is full, so the thread will wake up; or it has ended
            os.write(self._wake, b"!")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wait()
                with suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
                while self._requests:
                    self._requests.popleft()()
                self._exchange()
        finally:
            self._end()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        if self._process is not None:
            self._process.register(poll)
        poll.poll()

    def _exchange(self) -> None:
        """Pass commands on, read events, and start the process again if it has ended."""
        if self._process is None:
            return
        events, ended = self._process.exchange()
        for event in events:
            self._handle(event)
        if ended and not self._closing:
            self._restart()

    def _handle(self, event: dict[str, Any]) -> None:
        if "over" in event:
            self._waiting.pop(event["over"])(event["copied"])
        elif "state" in event:
            state = event["state"]
            self._held = frozenset(map(Generation.from_json, state["held"]))
            self._arriving = frozenset(map(ShardIdentity.from_json, state["arriving"]))
            count, seconds, size = state["totals"]
            self.totals = self._totals_before.plus(seconds=seconds, count=count, size=size)
        else:
            self._report(event["problem"])

    def _connect(self, command: dict[str, Any]) -> None:
        self._connected = command
        self._command("connect", **command)

    def _send(self, path: Path, over: Callable[[bool], None]) -> None:
        if self._process is None:
            over(False)
            return
        self._newest = path
        self._sends += 1
        self._waiting[self._sends] = over
        self._command("send", number=self._sends, path=str(path))

    def _retire(self, generations: frozenset[Generation]) -> None:
        self._held -= generations
        self._command("retire", generations=[list(each) for each in sorted(generations)])
        self._retired.extend(generations)
        if self._process is None:  # otherwise it deletes them
            remove_copies(self._memory, generations, self._rank)

    def _command(self, kind: str, **fields: Any) -> None:
        if self._process is not None:
            self._process.send({"kind": kind, **fields})

    def _restart(self) -> None:
        """Start the process again, a few times, and have it copy the newest file again."""
        self._totals_before = self.totals
        self._drop_process()
        what = "the process that copies shards to other machines ended"
        if self.restarts >= _MOST_RESTARTS:
            self._report(f"{what} for the {_MOST_RESTARTS + 1}th time and is not started again")
            return
        self.restarts += 1
        try:
            self._process = ReplicaProcess(self._setup, self.address)
        except (ScoutError, OSError) as error:
            self._report(f"{what} and cannot be started again: {error}")
            return
        self._report(f"{what} and was restarted")
        self._command("limit", rate=self._pace.rate)
        if self._connected is not None:
            self._command("connect", **self._connected)
        if self._newest is not None and self._newest.exists():
            self._send(self._newest, lambda _: None)

    def _drop_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()
        remove_copies(self._memory, self._retired, self._rank)  # what it has not deleted yet
        self._held, self._arriving = frozenset(), frozenset()
        waiting, self._waiting = self._waiting, {}
        for over in waiting.values():
            over(False)

    def _report(self, problem: str) -> None:
        self._problems.append(problem)
        log.error("%s", problem)

    def _end(self) -> None:
        if not self._closing:
            self._problems.append("copying shards to other machines has stopped: its thread failed")
        self._drop_process()
        os.close(self._wake_reader)
