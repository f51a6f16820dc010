"""A rank's own shards on their way to its holder's memory (paper, section 8).

Driven by one thread, which is not training's: see ``replicate``. Nothing here waits. A copy counts when the
holder says that it is sealed; whatever comes between is said in words, and tried again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq

from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.replication import messages as wire
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.errors import CheckpointError

__all__ = ["ReplicaSender"]

_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 0.25, 10.0
_ATTEMPTS = 3
"""Refusals of one shard before it is left alone; silence is never taken for a refusal."""
_VERIFIED_PER_SECOND = 1 << 30
"""Bytes that a holder verifies in a second at least."""
_COPIED_PER_SECOND = 64 << 20
"""Bytes below which a copy is called slow."""
_RETIRED_AT_ONCE = 500


def _nobody_cares(_: bool) -> None:
    return


class _Named(NamedTuple):
    """A sealed file, and what it holds."""

    path: Path
    identity: ShardIdentity
    over: Callable[[bool], None] = _nobody_cares
    """To be called when the file is not needed here any more, with whether it was copied."""


@dataclass(slots=True)
class _Copy:
    """One attempt to send one shard."""

    named: _Named
    file: int
    size: int
    transfer: str
    begun: float
    heard: float
    """When the holder last moved it on."""
    offered: bool = False
    allowed: int = 0
    """Up to where the holder has room."""
    sent: int = 0
    slow: bool = False
    """It was said that this takes long."""

    @property
    def generation(self) -> Generation:
        return self.named.identity.generation

    def patience(self, seconds: float) -> float:
        return seconds + (self.size / _VERIFIED_PER_SECOND if self.sent == self.size else 0.0)


class ReplicaSender:
    """The owner's end: one shard under way, and at most one that waits."""

    def __init__(self, open_socket: Callable[[], zmq.Socket[bytes]], holder: str, patience: float) -> None:
        """``holder`` in words; ``open_socket`` connects to it, as often as needed."""
        self.problems: list[str] = []
        self.held: frozenset[Generation] = frozenset()
        self._open_socket, self._holder, self._patience = open_socket, holder, patience
        self.socket = open_socket()
        self._copy: _Copy | None = None
        self._waiting: _Named | None = None
        self._newest: _Named | None = None
        self._retiring: dict[Generation, None] = {}
        self._not_before, self._backoff, self._refusals = 0.0, _BACKOFF_SECONDS, 0
        self._greeted = self._asked_retire = float("-inf")
        self._unanswered: float | None = None

    @property
    def busy(self) -> bool:
        """Whether something could be sent that is not."""
        return self._copy is not None and (not self._copy.offered or self._copy.sent < self._copy.allowed)

    @property
    def newest(self) -> Path | None:
        """What was to be sent last, whether or not it arrived."""
        under_way = None if self._copy is None else self._copy.named
        named = self._waiting or under_way or self._newest
        return None if named is None else named.path

    def put(self, path: Path, over: Callable[[bool], None] = _nobody_cares) -> None:
        """To be sent next, instead of what waits by now; ``over`` is called when that is done or given up."""
        try:
            named = _Named(path, shards.inspect(path).identity, over)
        except CheckpointError as error:
            self.problems.append(f"nothing to copy to {self._holder}: {error}")
            over(False)
            return
        self._stop_waiting()
        self._waiting = named
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
            self.problems.append(f"copies to {self._holder} come too late: checks are faster than they are")
            self._unanswered = None  # it may have answered where nobody listens any more
            self._end()
            self._reopen()

    def turn(self, now: float) -> None:
        """Take what has come, and go on as far as possible without waiting."""
        for heard in wire.receive(self.socket):
            self._hear(heard.message, now)
        if self._copy is not None:
            self._go_on(self._copy, now)
        elif self._waiting is not None and now >= self._not_before:
            self._begin(self._waiting, now)
        self._tell_retired(now)
        self._greet(now)

    def close(self) -> None:
        self._stop_waiting()
        self._end()
        self.socket.close()

    def _begin(self, named: _Named, now: float) -> None:
        self._waiting = None
        try:
            file = os.open(named.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.problems.append(f"nothing to copy to {self._holder}: {named.path}: {error.strerror}")
            named.over(False)
            return
        self._copy = _Copy(named, file, os.fstat(file).st_size, secrets.token_hex(8), now, now)
        self._go_on(self._copy, now)

    def _go_on(self, copy: _Copy, now: float) -> None:
        if not copy.offered:
            fields = {"identity": copy.named.identity.to_json(), "size": copy.size}
            copy.offered = self._send(wire.encode("offer", transfer=copy.transfer, **fields))
        while copy.sent < copy.allowed and self._send_chunk(copy):
            pass
        if now - copy.heard > copy.patience(self._patience):
            how = "does not answer" if copy.offered else "could not be reached"
            self._fail(copy, f"it {how} for {self._patience:g} s", now)
        elif now - copy.begun > self._patience + copy.size / _COPIED_PER_SECOND and not copy.slow:
            copy.slow = True
            said = f"{copy.sent} of {copy.size} bytes in {now - copy.begun:.0f} s"
            self.problems.append(f"copying {copy.generation} to {self._holder} is slow: {said}")

    def _send_chunk(self, copy: _Copy) -> bool:
        try:
            data = os.pread(copy.file, min(wire.CHUNK, copy.allowed - copy.sent), copy.sent)
        except OSError as error:
            data = b""
            self.problems.append(f"cannot read {copy.named.path}: {error.strerror}")
        if not data:  # the holder will notice that it comes no further, or has noticed
            copy.allowed = copy.sent
            return False
        header = wire.encode("chunk", transfer=copy.transfer, offset=copy.sent)
        if sent := self._send(header, data):
            copy.sent += len(data)
        return sent

    def _hear(self, message: dict[str, object], now: float) -> None:
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
        if kind == "credit":
            self._allow(copy, message.get("upto"), now)
        elif kind == "sealed":
            self._sealed(copy, now)
        elif kind == "refused":
            self._refused(copy, str(message.get("why"))[:300], now)

    def _allow(self, copy: _Copy, upto: object, now: float) -> None:
        """More room there; only more counts as a sign of life."""
        if isinstance(upto, int) and copy.allowed < upto <= copy.size:
            copy.allowed, copy.heard = upto, now

    def _sealed(self, copy: _Copy, now: float) -> None:
        if copy.sent < copy.size:
            sent = f"{copy.sent} of {copy.size} bytes"
            self._fail(copy, f"it says it has all of it after {sent}, which cannot be", now)
            return
        self.held |= {copy.generation}
        self._newest = _Named(copy.named.path, copy.named.identity)
        self._backoff, self._refusals = _BACKOFF_SECONDS, 0
        self._end(copied=True)

    def _refused(self, copy: _Copy, why: str, now: float) -> None:
        self._refusals += 1
        if self._refusals < _ATTEMPTS:
            self._fail(copy, f"it was refused: {why}", now)
            return
        self.problems.append(
            self._sentence(copy, f"it was refused {_ATTEMPTS} times, and is given up: {why}")
        )
        self._end()
        self._reopen()

    def _fail(self, copy: _Copy, why: str, now: float) -> None:
        """Say so, and try again after a while with whatever is the newest by then."""
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
        """A holder that came back may have lost what it held."""
        self._unanswered = None
        lost, self.held = self.held - there, self.held & there
        if lost:
            self.problems.append(f"{self._holder} lost its copies of {', '.join(map(str, sorted(lost)))}")
        if self._newest is not None and self._newest.identity.generation in lost and self._copy is None:
            self._waiting = self._waiting or self._newest

    def _tell_retired(self, now: float) -> None:
        if self._retiring and self._copy is None and now - self._asked_retire > self._patience:
            some = list(self._retiring)[:_RETIRED_AT_ONCE]
            if self._send(wire.encode("retire", generations=wire.plain(some))):
                self._asked_retire = now

    def _greet(self, now: float) -> None:
        """While nothing is under way, ask from time to time whether the holder still has it all."""
        if self._copy is not None or now - self._greeted < self._patience / 2:
            return
        if self._unanswered is not None and now - self._unanswered > self._patience:
            self.problems.append(f"{self._holder} does not answer; what it holds may be gone")
            self._unanswered = None
            self._reopen()
        self._greeted = now
        self._unanswered = now if self._unanswered is None else self._unanswered
        self._send(wire.encode("hello"))

    def _send(self, *frames: bytes) -> bool:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.over(False)

    def _end(self, *, copied: bool = False) -> None:
        """Nothing more of it is sent, now or later."""
        copy = self._copy
        self._drop()
        if copy is not None:
            copy.named.over(copied)

    def _drop(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            os.close(copy.file)

    def _reopen(self) -> None:
        """What is queued for a holder that hangs must not reach it later, among other things."""
        self.socket.close(linger=0)
        self.socket = self._open_socket()
