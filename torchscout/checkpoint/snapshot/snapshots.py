"""Captures a rank's state in memory while training goes on (paper, section 8).

Parameters and optimizer state do not change between two updates, so they are copied meanwhile; ``fence``,
before the next update, waits for the copy if necessary. Everything else is copied before ``capture``
returns. A background thread computes digests and seals the snapshot. Failures never propagate into training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch

from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.snapshot.buffers import BufferPool
from torchscout.checkpoint.snapshot.device_copy import Copies, Stage, TensorCopy
from torchscout.checkpoint.state.training_state import State
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.encoding import bytes_of, name_of
from torchscout.checkpoint.storage.shard_format import Outline, ShardIdentity, digest, outline
from torchscout.checkpoint.totals import Totals
from torchscout.errors import CheckpointError, describe_error
from torchscout.utils.cuda_graphs import ignore_other_threads

__all__ = ["Capture", "Snapshots"]

_FAILURES = (OSError, RuntimeError, ValueError, MemoryError, CheckpointError)
"""Raised by a full file system, a device, or too little memory."""
_HEADER_GRAIN = 4096


class Capture:
    """One snapshot, in progress until it is sealed or has failed."""

    def __init__(self, identity: ShardIdentity, path: Path) -> None:
        self.identity = identity
        self.path = path
        """Its path once it is sealed."""
        self.problem: str | None = None
        """Why it failed; None if it has not failed."""
        self.digests: Mapping[str, str] = {}
        """The digest of every tensor, by name, once it is sealed."""
        self.held_seconds = 0.0
        """How long training has waited in ``capture`` and ``fence``."""
        self._copied, self._over = threading.Event(), threading.Event()
        self._given_up: str | None = None

    @property
    def is_sealed(self) -> bool:
        return self._over.is_set() and self.problem is None

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is sealed or has failed, or for ``seconds``; returns whether it is sealed."""
        self._over.wait(seconds)
        return self.is_sealed

    def _end(self, problem: str | None) -> None:
        self.problem = problem
        self._copied.set()
        self._over.set()


class _Task(NamedTuple):
    """The part of a capture that runs in the background."""

    capture: Capture
    role: TrustLevel
    state: State
    staged: Mapping[str, torch.Tensor]
    """Copies of the state's prompt tensors."""
    versions: Mapping[str, int]
    """The version counters of the live tensors when they were captured."""
    copies: Copies


class Snapshots:
    """The snapshots of one rank. Call ``capture`` and ``fence`` on the training thread."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        copies: int = 3,
        limit: int | None = None,
        timeout_seconds: float = 120.0,
        protected: Callable[[], frozenset[Generation]] = frozenset,
    ) -> None:
        """``copies`` buffers are written in turn, so all but one are whole; ``limit`` is the size of one.

        Generations that are ``protected`` when a capture begins are overwritten only after ``retire``.
        """
        if copies < 2:
            raise ValueError(f"copies must be at least 2, one whole and one being written; got {copies}")
        self._folder, self._rank = Path(folder), rank
        self._limit, self._timeout = limit, timeout_seconds
        self.totals = Totals()
        """The snapshots that were begun, their bytes, and how long training has waited for them."""
        self._pool = BufferPool(self._folder, rank, copies, protected)
        self._stage = Stage()
        self._header_room = 0
        self._last: Capture | None = None
        self._unfenced: _Task | None = None
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def capture(self, identity: ShardIdentity, role: TrustLevel, state: State) -> Capture:
        """Start a snapshot of this state; returns as soon as training may continue."""
        begin = time.perf_counter()
        capture = Capture(identity, shards.path_of(self._folder, identity, self._rank))
        try:
            self._refuse(state)
            versions = {name: _version(each) for name, each in state.live.items()}
            staged = self._stage.take(state.prompt)
            copies = Copies([*state.live.values(), *staged.values()])
        except _FAILURES as error:
            capture._end(describe_error(error))
        else:
            self._last = capture
            self._unfenced = task = _Task(capture, role, state, staged, versions, copies)
            self._begin(lambda: self._complete(task))
            self.totals = self.totals.plus(count=1, size=state.bytes)
        self._training_waited(capture, begin)
        return capture

    def fence(self) -> None:
        """Wait until the state that an update changes has been copied. Call before every update."""
        task, self._unfenced = self._unfenced, None
        if task is None:
            return
        capture, begin = task.capture, time.perf_counter()
        if capture._copied.wait(self._timeout):
            try:
                task.copies.fence()
            except _FAILURES as error:
                capture._given_up = describe_error(error)
        else:
            capture._given_up = f"the state was not copied within {self._timeout} s"
        self._training_waited(capture, begin)

    def prepare(self, size: int) -> None:
        """Allocate memory for a snapshot of about this size in advance, so that the first is not slower."""
        self._begin(lambda: self._prepare(size))

    @property
    def sealed(self) -> list[Generation]:
        """The sealed generations, oldest first."""
        return self._pool.sealed

    @contextmanager
    def held(self, generation: Generation) -> Iterator[Path | None]:
        """Yield the path of a snapshot, or None; its file is not reused within the block."""
        path = self._pool.hold(generation)
        try:
            yield path
        finally:
            if path is not None:
                self._pool.release(generation)

    def _training_waited(self, capture: Capture, since: float) -> None:
        seconds = time.perf_counter() - since
        capture.held_seconds += seconds
        self.totals = self.totals.plus(seconds=seconds)

    def retire(self, generation: Generation) -> None:
        """Allow this generation to be overwritten."""
        self._pool.retire(generation)

    def close(self) -> None:
        """Finish a capture in progress, and free everything that is not sealed. Idempotent."""
        if not self._closed:
            self._closed = True
            self._work.put(None)
            if self._thread is not None:
                self._thread.join(self._timeout)
            if self._thread is None or not self._thread.is_alive():
                self._pool.close()

    def _refuse(self, state: State) -> None:
        if self._closed:
            raise CheckpointError("the snapshots are closed")
        if self._limit is not None and state.bytes > self._limit:
            raise CheckpointError(f"the state has {state.bytes} bytes, a snapshot may have {self._limit}")
        # Captures that come faster than sealing wait for it.
        if self._last is not None and not self._last._over.wait(self._timeout):
            raise CheckpointError(f"the snapshot of {self._last.identity.generation} is not done yet")

    def _begin(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="torchscout-snapshot", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with suppress(OSError, RuntimeError):  # another kind of accelerator
            ignore_other_threads()
        while (work := self._work.get()) is not None:
            work()
            del work  # it keeps training's tensors alive

    def _prepare(self, size: int) -> None:
        with suppress(*_FAILURES):  # the next capture fails the same way and reports it
            self._pool.prepare(size)

    def _complete(self, task: _Task) -> None:
        problem: str | None = "it ended unexpectedly"
        try:
            size = self._write(task)
            problem = None
        except _FAILURES as error:
            problem = describe_error(error)
        finally:
            task.capture._end(problem)
        if problem is None:
            self._prepare(size)

    def _write(self, task: _Task) -> int:
        """Write and seal the snapshot, and return its size; on failure nothing of it remains."""
        buffer, is_sealed = self._pool.take(), False
        try:
            laid_out = self._laid_out(task)
            memory = buffer.memory(laid_out.size)
            _fill(memory, laid_out, task, bool(task.copies.sides) and buffer.pin())
            self._pool.seal(buffer, task.capture.identity)
            is_sealed = True
            return laid_out.size
        finally:
            if not is_sealed:
                self._pool.discard(buffer)

    def _laid_out(self, task: _Task) -> Outline:
        """The layout, the same for the same tensors, so that a buffer's memory can be reused."""
        tensors = {**task.staged, **task.state.live}
        described = [(name, name_of(each.dtype), tuple(each.shape)) for name, each in tensors.items()]
        for _ in range(2):
            laid_out = outline(
                task.capture.identity, task.role, task.state.document, described, self._header_room
            )
            if laid_out.header_bytes == self._header_room:
                break
            # With some slack, because the number of digits in it varies.
            self._header_room = -(-laid_out.header_bytes * 9 // 8 // _HEADER_GRAIN) * _HEADER_GRAIN
        return laid_out


def _fill(memory: torch.Tensor, laid_out: Outline, task: _Task, pinned: bool) -> None:
    """Write all parts: what training waits for first, the header last."""
    staged, live = task.staged, task.state.live
    sources = (*staged.values(), *live.values())
    copies = [TensorCopy(each, memory, first) for each, first in zip(sources, laid_out.places, strict=True)]
    task.copies.issue(copies[len(staged) :], pinned)
    if changed := [name for name, each in live.items() if _version(each) != task.versions[name]]:
        raise CheckpointError(f"{changed[0]} was changed while it was copied, and not by an update")
    task.capture._copied.set()
    task.copies.issue(copies[: len(staged)], pinned)
    task.copies.wait()
    shard = bytes_of(memory)
    for end, first in zip((laid_out.start, *laid_out.ends), laid_out.places, strict=False):
        shard[end:first] = bytes(first - end)
    spans = zip(laid_out.places, laid_out.ends, strict=True)
    digests = [digest(shard[first:end]) for first, end in spans]
    head = laid_out.head(digests)
    shard[: len(head)] = head
    task.capture.digests = dict(zip((*staged, *live), digests, strict=True))
    if task.capture._given_up is not None:
        raise CheckpointError(task.capture._given_up)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
