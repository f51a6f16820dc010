"""Sends a rank's shards to its holder's memory (paper, section 8).

Runs on the thread of ``ReplicationEngine``, and nothing blocks; a stream on its own thread sends the bytes. A
copy counts when the holder reports it as sealed; any failure before that is reported, and the copy is tried
again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq

from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.replication import messages as wire
from torchscout.checkpoint.replication.pace import SLOWEST, RateLimit
from torchscout.checkpoint.replication.streams import OutgoingStream, Secret
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.checkpoint.totals import Totals
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import open_file

__all__ = ["ReplicaSender"]

_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 0.25, 10.0
_ATTEMPTS = 3
"""Refusals of one shard before it is given up; a timeout is not a refusal."""
_VERIFIED_PER_SECOND = 1 << 30
"""The minimum rate, in bytes, at which a holder verifies."""
_COPIED_PER_SECOND = SLOWEST // 2
"""The rate, in bytes, below which a copy is reported as slow."""
_RETIRED_AT_ONCE = 500
_REASON_SECONDS = 1.0
"""How long to wait, after a stream has failed, for the message in which the holder says why."""


class _Named(NamedTuple):
    """A sealed file and its identity."""

    path: Path
    identity: ShardIdentity
    size: int
    """Of the shard; its file may be longer."""
    over: Callable[[bool], None] = lambda _: None
    """Called when the file is no longer needed, with whether it was copied."""


@dataclass(slots=True)
class _Copy:
    """One attempt to send one shard."""

    named: _Named
    file: int
    transfer: str
    begun: float
    progressed: float
    """When the holder last took bytes, or answered."""
    offered: bool = False
    stream: OutgoingStream | None = None
    """Set when the holder is ready."""
    sent: int = 0
    broken: float | None = None
    """When the stream's failure was noticed."""
    slow: bool = False
    """Whether it was reported as slow."""

    @property
    def generation(self) -> Generation:
        return self.named.identity.generation

    @property
    def size(self) -> int:
        return self.named.size

    def timeout(self, seconds: float) -> float:
        """How long the holder may take to answer, including the time to verify a complete shard."""
        return seconds + (self.size / _VERIFIED_PER_SECOND if self.sent == self.size else 0.0)


class ReplicaSender:
    """The owner's end: sends one shard at a time; at most one more waits."""

    def __init__(
        self,
        open_socket: Callable[[], zmq.Socket[bytes]],
        address: wire.Address,
        holder: str,
        timeout: float,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``holder`` is a description; ``open_socket`` connects to it and may be called again. ``wake`` is
        called on another thread when ``turn`` has something to do."""
        self.problems: list[str] = []
        self.held: frozenset[Generation] = frozenset()
        self.totals = Totals()
        """The copies that the holder has sealed."""
        self.limit = RateLimit()
        self._open_socket, self._address, self._holder = open_socket, address, holder
        self._timeout, self._wake = timeout, wake
        self.socket = open_socket()
        self._copy: _Copy | None = None
        self._waiting: _Named | None = None
        self._newest: _Named | None = None
        self._retiring: dict[Generation, None] = {}
        self._not_before, self._backoff, self._refusals = 0.0, _BACKOFF_SECONDS, 0
        self._last_hello = self._asked_retire = float("-inf")
        self._unanswered: float | None = None

    @property
    def busy(self) -> bool:
        """Whether a copy is in progress."""
        return self._copy is not None

    @property
    def newest(self) -> Path | None:
        """The last file that was to be sent, whether or not it arrived."""
        under_way = None if self._copy is None else self._copy.named
        named = self._waiting or under_way or self._newest
        return None if named is None else named.path

    def put(self, path: Path, over: Callable[[bool], None] = lambda _: None) -> None:
        """Send this file next, in place of one that waits; ``over`` is called with whether it was copied."""
        try:
            header = shards.inspect(path)
        except CheckpointError as error:
            self.problems.append(f"cannot copy to {self._holder}: {error}")
            over(False)
            return
        self._stop_waiting()
        self._waiting = _Named(path, header.identity, header.size, over)
        self._refusals, self._not_before = 0, 0.0

    def retire(self, generations: Iterable[Generation]) -> None:
        gone = frozenset(generations)
        self._retiring |= dict.fromkeys(sorted(gone))
        self.held -= gone
        if self._newest is not None and self._newest.identity.generation in gone:
            self._newest = None
        if self._waiting is not None and self._waiting.identity.generation in gone:
            self._stop_waiting()
        if self._copy is not None and self._copy.generation in gone:
            self.problems.append(
                f"copies to {self._holder} come too late: checks are more frequent than copies can be made"
            )
            self._unanswered = None  # its answer may go to the socket that is closed now
            self._end()
            self._reopen()

    def turn(self, now: float) -> None:
        """Process received messages, and send as much as possible without blocking."""
        for received in wire.receive(self.socket):
            self._process(received.message, now)
        if self._copy is not None:
            self._continue(self._copy, now)
        elif self._waiting is not None and now >= self._not_before:
            self._begin(self._waiting, now)
        self._send_retired(now)
        self._send_hello(now)

    def close(self) -> None:
        self._stop_waiting()
        self._end()
        self.socket.close()

    def _begin(self, named: _Named, now: float) -> None:
        self._waiting = None
        try:
            file = open_file(named.path, os.O_RDONLY)
        except OSError as error:
            self.problems.append(f"cannot copy to {self._holder}: {named.path}: {error.strerror}")
            named.over(False)
            return
        self._copy = _Copy(named, file, secrets.token_hex(8), now, now)
        self._continue(self._copy, now)

    def _continue(self, copy: _Copy, now: float) -> None:
        if not copy.offered:
            fields = {"identity": copy.named.identity.to_json(), "size": copy.size}
            copy.offered = self._send(wire.encode("offer", transfer=copy.transfer, **fields))
        if copy.stream is not None:
            self._watch(copy, copy.stream, now)
        if self._copy is not copy:
            return
        if now - copy.progressed > copy.timeout(self._timeout):
            how = "did not answer" if copy.offered else "could not be reached"
            self._fail(copy, f"it {how} for {self._timeout:g} s", now)
        elif now - copy.begun > self._timeout + copy.size / _COPIED_PER_SECOND and not copy.slow:
            copy.slow = True
            progress = f"{copy.sent} of {copy.size} bytes in {now - copy.begun:.0f} s"
            self.problems.append(f"copying {copy.generation} to {self._holder} is slow: {progress}")

    def _watch(self, copy: _Copy, stream: OutgoingStream, now: float) -> None:
        """Note how far the stream is, and fail if it has failed."""
        if stream.moved > copy.sent:
            copy.sent, copy.progressed = stream.moved, now
        if stream.ended and not stream.succeeded:
            copy.broken = now if copy.broken is None else copy.broken
            if now - copy.broken >= _REASON_SECONDS:
                self._fail(copy, f"the connection failed after {copy.sent} bytes: {stream.error}", now)

    def _process(self, message: dict[str, object], now: float) -> None:
        kind, copy = message["kind"], self._copy
        try:
            if kind == "holding":
                self._compare(wire.generations_of(message))
            elif kind == "retired":
                for each in wire.generations_of(message):
                    self._retiring.pop(each, None)
                self._asked_retire = float("-inf")
        except ValueError:
            return
        if copy is None or message.get("transfer") != copy.transfer:
            return
        if kind == "ready" and copy.stream is None:
            self._start(copy, message.get("secret"), now)
        elif kind == "sealed":
            self._sealed(copy, now)
        elif kind == "refused":
            self._refused(copy, str(message.get("why"))[:300], now)

    def _start(self, copy: _Copy, secret: object, now: float) -> None:
        try:
            opened = Secret.from_json(secret)
        except ValueError:
            return
        copy.stream = OutgoingStream(self._address, opened, copy.file, copy.size, self._wake, self.limit)
        copy.progressed = now
        copy.stream.start()

    def _sealed(self, copy: _Copy, now: float) -> None:
        if copy.stream is None or copy.stream.moved < copy.size:
            self._fail(copy, f"it reports all as sealed after {copy.sent} of {copy.size} bytes", now)
            return
        self.held |= {copy.generation}
        self.totals = self.totals.plus(seconds=now - copy.begun, count=1, size=copy.size)
        self._newest = copy.named._replace(over=lambda _: None)
        self._backoff, self._refusals = _BACKOFF_SECONDS, 0
        self._unanswered = None
        self._end(copied=True)

    def _refused(self, copy: _Copy, why: str, now: float) -> None:
        self._refusals += 1
        if self._refusals < _ATTEMPTS:
            self._fail(copy, f"it was refused: {why}", now)
            return
        self.problems.append(self._sentence(copy, f"it was refused {_ATTEMPTS} times and is given up: {why}"))
        self._end()
        self._reopen()

    def _fail(self, copy: _Copy, why: str, now: float) -> None:
        """Report it, and try again later with the newest shard by then."""
        self.problems.append(self._sentence(copy, why))
        self._not_before = now + self._backoff
        self._backoff = min(2 * self._backoff, _LONGEST_BACKOFF_SECONDS)
        self._drop()
        if self._waiting is None:
            self._waiting = copy.named
        else:
            copy.named.over(False)
        self._reopen()

    def _sentence(self, copy: _Copy, why: str) -> str:
        return f"{copy.generation} of rank {copy.named.identity.rank} has no copy at {self._holder}: {why}"

    def _compare(self, there: frozenset[Generation]) -> None:
        """Compare with what the holder has: after a restart it may have lost copies."""
        self._unanswered = None
        lost, self.held = self.held - there, self.held & there
        if lost:
            self.problems.append(f"{self._holder} has lost its copies of {', '.join(map(str, sorted(lost)))}")
        if self._newest is not None and self._newest.identity.generation in lost and self._copy is None:
            self._waiting = self._waiting or self._newest

    def _send_retired(self, now: float) -> None:
        if self._retiring and self._copy is None and now - self._asked_retire > self._timeout:
            some = list(self._retiring)[:_RETIRED_AT_ONCE]
            if self._send(wire.encode("retire", generations=wire.plain(some))):
                self._asked_retire = now

    def _send_hello(self, now: float) -> None:
        """Ask the holder periodically, while nothing is being sent, which copies it has."""
        if self._copy is not None or now - self._last_hello < self._timeout / 2:
            return
        if self._unanswered is not None and now - self._unanswered > self._timeout:
            self.problems.append(f"{self._holder} does not answer; its copies may be lost")
            self._unanswered = None
            self._reopen()
        self._last_hello = now
        self._unanswered = now if self._unanswered is None else self._unanswered
        self._send(wire.encode("hello"))

    def _send(self, frame: bytes) -> bool:
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.over(False)

    def _end(self, *, copied: bool = False) -> None:
        """End the current copy for good."""
        copy = self._copy
        self._drop()
        if copy is not None:
            copy.named.over(copied)

    def _drop(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            if copy.stream is not None:
                copy.stream.abort()
            os.close(copy.file)

    def _reopen(self) -> None:
        """Discard messages that are queued for a holder that does not read them."""
        self.socket.close(linger=0)
        self.socket = self._open_socket()
