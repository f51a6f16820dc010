"""Captures a rank's state in memory while training goes on (paper, section 8).

Parameters and optimizer state do not change between two updates, so they are copied meanwhile; everything
else is copied before ``capture`` returns. A background thread computes digests and seals the snapshot.
Failures never propagate into training.

[Note: a capture never holds training]

``is_ready`` says, without waiting, whether a capture could begin; otherwise the whole job skips it. From
CUDA, tensors are copied to pinned memory on a stream of their own, and ``fence`` lets the device, and not the
host, order the update behind the copies. In all other cases the background thread copies, and ``fence``
waits for it within a bound that follows from the size; if that is not enough, the capture is given up.

[Note: one state]

A program may write to a parameter between two updates. So the signatures of the tensors are computed when the
capture begins and, after all copies, when the next update does. If they are equal, all tensors were copied
from the same state. Version counters would not show a write through ``.data``.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar

import torch

from torchscout.c3.fold import not_finite_with_torch
from torchscout.c3.signature import PendingSignatures, read_signatures, recorded
from torchscout.checkpoint.buffers import Buffer, BufferPool
from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.shard_format import Outline, ShardIdentity, digest
from torchscout.checkpoint.totals import Totals
from torchscout.errors import CheckpointError, describe_error
from torchscout.log import log
from torchscout.state.collect import SCOUT_PREFIX, State
from torchscout.state.layout import bytes_of, fill, name_of
from torchscout.utils.cuda_graphs import ignore_other_threads

__all__ = ["Capture", "Snapshots"]

_FAILURES = (OSError, RuntimeError, ValueError, MemoryError, CheckpointError)
"""Raised by a full file system, a device, or too little memory."""
_SAVED = f"registered/{SCOUT_PREFIX}"
"""Begins the names of tensors that never change: another value is another tensor."""
_HEADER_GRAIN = 4096
_AT_ONCE = 1 << 20
"""Bytes on the host that are copied on the training thread, since that takes less time than to hand over."""
_LEAST_SECONDS, _BYTES_PER_SECOND = 1.0, 1e9
"""How long ``fence`` waits at most for copies that the host makes."""


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
        self._over = threading.Event()

    @property
    def is_sealed(self) -> bool:
        return self._over.is_set() and self.problem is None

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is sealed or has failed, or for ``seconds``; returns whether it is sealed.

        It is sealed only after ``fence`` or ``settle``.
        """
        self._over.wait(seconds)
        return self.is_sealed

    def _end(self, problem: str | None) -> None:
        self.problem = problem
        self._over.set()


class _Side:
    """Copies from one device to host memory, on a stream of their own."""

    _streams: ClassVar[dict[torch.device, Any]] = {}

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = self._module.Stream(device=device)
        # A thread that waits for a blocking event does not poll.
        self._copied = self._module.Event(**({"blocking": True} if device.type == "cuda" else {}))
        self.follow_training()

    def follow_training(self) -> None:
        """Let further work of this side wait, on the device, for what the calling thread has issued."""
        self._streams[self.device].wait_stream(self._module.current_stream(self.device))

    def order_training(self) -> None:
        """Let further work of the calling thread wait, on the device, for the copies."""
        self._module.current_stream(self.device).wait_event(self._copied)

    def copy(self, copies: Sequence[tuple[torch.Tensor, int]], buffer: Buffer) -> None:
        """Issue copies to offsets of a buffer. Returns at once only if the buffer is pinned."""
        with self.work():
            _copy(copies, buffer)
            self._copied.record(self._streams[self.device])

    def work(self) -> AbstractContextManager[Any]:
        """In this block, work on the device belongs to this side."""
        found: AbstractContextManager[Any] = self._module.stream(self._streams[self.device])
        return found

    def wait(self) -> None:
        """Wait for the copies that were issued."""
        self._copied.synchronize()


@dataclass(slots=True)
class _Task:
    """A capture that has begun."""

    capture: Capture
    role: TrustLevel
    document: Any
    tensors: Mapping[str, torch.Tensor]
    """All tensors in the order of the shard; of those that may change at once, the copies on devices."""
    state: State
    live: Mapping[str, torch.Tensor]
    """The tensors that do not change before the update."""
    outline: Outline
    buffer: Buffer
    sides: Sequence[_Side]
    known: Mapping[int, tuple[weakref.ref[torch.Tensor], str]]
    """``Buffer.saved`` of the snapshot before."""
    later: list[Callable[[], None]] = field(default_factory=list)
    """Copies that the background thread makes."""
    folds: list[PendingSignatures] = field(default_factory=list)
    """The signatures of the live tensors, before and after the copies."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when only the devices may still copy what an update changes."""
    may_end: threading.Event = field(default_factory=threading.Event)
    """Set when an update follows, or when it is known that none does."""
    given_up: str | None = None

    def fold(self) -> None:
        """Compute, or begin to compute, the signatures of the live tensors; on devices, where that takes no
        time, at first also whether they are finite."""
        self.folds.append(self.state.sign([*self.live], finite=bool(self.sides) and not self.folds))
        for side in self.sides:
            side.follow_training()  # which reads them


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
        self._folder = Path(folder)
        self._rank = rank
        self._limit = limit
        self._timeout = timeout_seconds
        self.totals = Totals()
        """The snapshots that were begun, their bytes, and how long training has waited for them."""
        self.skipped = 0
        """Captures that were passed over because no buffer was ready."""
        self._pool = BufferPool(self._folder, rank, copies, limit, protected)
        self._size = 1
        """Of the last snapshot, or of the first as far as it is known."""
        self._device: torch.device | None = None
        """The CUDA device of the state, for which buffers are pinned."""
        self._outline = Outline([], 0)
        """The layout of the last snapshot."""
        self._most_tensors = 0
        """For how many its header has room, roughly: see ``_moved``."""
        self._unfenced: _Task | None = None
        self._idle = threading.Event()
        """Whether no capture and no preparation is in progress."""
        self._idle.set()
        self._closed = False

    def prepare(self, size: int, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Prepare memory in the background for snapshots of about this size of state on these devices."""
        self._size = max(size, self._size)
        self._device = _cuda_device(tensors)
        if self._idle.is_set():
            self._begin(self._prepare)

    def is_ready(self) -> bool:
        """Whether a capture could begin: the last one is over, and there is memory for another.

        Never waits. If memory is missing, it is prepared in the background.
        """
        if self._closed or not self._idle.is_set():
            return False
        if self._pool.is_ready(self._size):
            return True
        self._begin(self._prepare)
        return False

    @property
    def problem(self) -> str:
        """Why memory could not be prepared; empty if it could, or is being prepared."""
        return self._pool.problem

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait for the end of what is in progress; returns ``is_ready``."""
        return self._idle.wait(seconds) and self.is_ready()

    def skip(self, why: str) -> None:
        """Count a capture that the job passes over, and log the first."""
        self.skipped += 1
        if self.skipped == 1:
            log.warning("a capture was skipped: %s. Further ones are counted in session.status()", why)

    def capture(self, identity: ShardIdentity, role: TrustLevel, state: State) -> Capture:
        """Start a snapshot of this state; returns as soon as training may continue.

        Fails if ``is_ready`` is false.
        """
        begin = time.perf_counter()
        capture = Capture(identity, shards.path_of(self._folder, identity, self._rank))
        try:
            task = self._started(capture, role, state)
        except _FAILURES as error:
            capture._end(describe_error(error))
        else:
            self._unfenced = task
            self._begin(lambda: self._complete(task))
            self.totals = self.totals.plus(count=1, size=state.bytes)
        self._training_waited(capture, begin)
        return capture

    def fence(self) -> None:
        """Order the update behind the copies of what it changes. Call before every update."""
        task, self._unfenced = self._unfenced, None
        if task is None or task.may_end.is_set():
            return
        begin = time.perf_counter()
        seconds = min(self._timeout, _LEAST_SECONDS + task.outline.size / _BYTES_PER_SECOND)
        try:
            if not task.copied.wait(seconds):
                raise CheckpointError(f"the state was not copied within {seconds:.1f} s")
            for side in task.sides:
                side.order_training()
            task.fold()
        except _FAILURES as error:
            task.given_up = describe_error(error)
        task.may_end.set()
        self._training_waited(task.capture, begin)

    def settle(self) -> None:
        """Let a capture in progress end although no update follows. For any thread."""
        if (task := self._unfenced) is not None:
            task.may_end.set()

    @property
    def sealed(self) -> list[Generation]:
        """The generations in memory, oldest first."""
        return self._pool.sealed

    def held(self, generation: Generation) -> AbstractContextManager[Path | None]:
        """Yield the path of a snapshot, or None; its file does not change within the block."""
        return self._pool.held(generation)

    def retire(self, generation: Generation) -> bool:
        """Allow this generation to be overwritten once nothing reads it; False if it is not in memory."""
        return self._pool.retire(generation)

    def close(self) -> None:
        """Finish a capture in progress, and free everything that is not sealed. Idempotent."""
        if not self._closed:
            self._closed = True
            self.settle()
            if self._idle.wait(self._timeout):
                self._pool.close()

    def _training_waited(self, capture: Capture, since: float) -> None:
        seconds = time.perf_counter() - since
        capture.held_seconds += seconds
        self.totals = self.totals.plus(seconds=seconds)

    def _begin(self, work: Callable[[], None]) -> None:
        def run() -> None:
            with suppress(OSError, RuntimeError):  # another kind of accelerator
                ignore_other_threads()
            work()

        self._idle.clear()
        threading.Thread(target=run, name="torchscout-snapshot", daemon=True).start()

    def _prepare(self) -> None:
        size = 0
        try:
            while size < self._size:  # it may become larger meanwhile
                size = self._size
                self._pool.prepare(size, self._device)
        finally:
            self._idle.set()

    def _started(self, capture: Capture, role: TrustLevel, state: State) -> _Task:
        """Copy what may change at once, and issue all other copies that need no thread."""
        if self._closed:
            raise CheckpointError("the snapshots are closed")
        if self._limit is not None and state.bytes > self._limit:
            raise CheckpointError(f"the state has {state.bytes} bytes, a snapshot may have {self._limit}")
        saved = {name: each for name, each in state.live.items() if name.startswith(_SAVED)}
        live = {name: each for name, each in state.live.items() if name not in saved}
        prompt = {name: each if each.is_cpu else each.detach().clone() for name, each in state.prompt.items()}
        # What has the same size in every snapshot comes first, so that its place does not change.
        tensors = {**live, **saved, **prompt}
        outline = self._laid_out(capture.identity, role, state.document, tensors)
        buffer = self._buffer(outline.size, _cuda_device(tensors.values()))
        known, buffer.saved = buffer.saved, {}
        sides = [_Side(device) for device in {each.device for each in tensors.values() if not each.is_cpu}]
        task = _Task(capture, role, state.document, tensors, state, live, outline, buffer, sides, known)
        rows = [
            (name, each, first) for (name, each), first in zip(tensors.items(), outline.places, strict=True)
        ]
        for side in sides:
            copies = [(each, first) for _, each, first in rows if each.device == side.device]
            if buffer.is_pinned:
                side.copy(copies, buffer)
            else:
                task.later.append(partial(side.copy, copies, buffer))
        on_host = [(each, first) for name, each, first in rows if each.is_cpu and name in live]
        if sum(each.nbytes for each, _ in on_host) <= _AT_ONCE:
            _copy(on_host, buffer)
        else:
            task.later.append(partial(_copy, on_host, buffer))
        _copy([(each, first) for name, each, first in rows if each.is_cpu and name in prompt], buffer)
        task.fold()
        return task

    def _buffer(self, size: int, device: torch.device | None) -> Buffer:
        try:
            if not self._idle.is_set():
                raise CheckpointError("the capture before it is not over")
            self._size = size
            self._device = device
            return self._pool.take(size)
        except CheckpointError as error:
            self.skip(str(error))
            self.is_ready()  # prepares memory if that is what is missing
            raise

    def _laid_out(
        self, identity: ShardIdentity, role: TrustLevel, document: Any, tensors: Mapping[str, torch.Tensor]
    ) -> Outline:
        """Where everything lies. The layout of the same tensors is not computed again."""
        described = [(name, name_of(each.dtype), tuple(each.shape)) for name, each in tensors.items()]
        if described != self._outline.tensors:
            room = self._outline.room
            if len(described) > self._most_tensors:
                header = Outline(described, 0).header(identity, role, document)
                room, self._most_tensors = max(room, _header_room(header)), len(described) * 9 // 8
            self._outline = Outline(described, room)
        return self._outline

    def _complete(self, task: _Task) -> None:
        problem: str | None = "it ended unexpectedly"
        try:
            self._write(task)
            problem = None
        except _FAILURES as error:
            problem = describe_error(error)
        finally:
            task.copied.set()
            self._prepare()  # usually, all memory is as it should be
            task.capture._end(problem)

    def _write(self, task: _Task) -> None:
        """Make the remaining copies, and seal the snapshot if all tensors are of one state."""
        for copies in task.later:
            copies()
        task.copied.set()
        for side in task.sides:
            side.wait()
        digests = _digests(task)
        task.may_end.wait()
        if task.given_up is not None:
            raise CheckpointError(task.given_up)
        signatures = _sound(task)
        outline, memory = task.outline, bytes_of(task.buffer.memory)
        proofs = [(digest, signatures.get(name)) for name, digest in zip(task.tensors, digests, strict=True)]
        header = outline.header(task.capture.identity, task.role, task.document, proofs)
        if len(header) > outline.room:
            outline = self._moved(task, header)
        for end, first in zip((outline.start, *outline.ends), outline.places, strict=False):
            memory[end:first] = bytes(first - end)
        memory[: outline.start] = outline.head(header)
        rows = zip(task.tensors.items(), outline.places, digests, strict=True)
        task.buffer.saved = {
            first: (weakref.ref(each), digest)
            for (name, each), first, digest in rows
            if name.startswith(_SAVED)
        }
        self._pool.seal(task.buffer, task.capture.identity, outline.size)
        task.capture.digests = dict(zip(task.tensors, digests, strict=True))

    def _moved(self, task: _Task, header: bytes) -> Outline:
        """Move the tensors behind a header that has become longer than expected."""
        before, after = task.outline, Outline(task.outline.tensors, _header_room(header))
        self._outline, self._size = after, after.size
        if after.size > len(task.buffer.memory):
            raise CheckpointError(f"no memory for {after.size} bytes is ready")
        if before.places:
            start, size = task.buffer.memory.data_ptr(), before.size - before.places[0]
            ctypes.memmove(start + after.places[0], start + before.places[0], size)
        return after


def _cuda_device(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    return next((each.device for each in tensors if each.is_cuda), None)


def _header_room(header: bytes) -> int:
    """Room for a header like this one, whose length varies a little."""
    return -(-len(header) * 5 // 4 // _HEADER_GRAIN) * _HEADER_GRAIN


def _copy(copies: Iterable[tuple[torch.Tensor, int]], buffer: Buffer) -> None:
    """Copy the bits of tensors to offsets of a buffer; to pinned memory, on the current stream."""
    with torch.no_grad():
        for source, first in copies:
            is_dense = source.is_contiguous() and not source.is_conj() and not source.is_neg()
            if is_dense and source.is_cpu:
                # Single-threaded and without the GIL, so that it does not take CPU threads from training.
                ctypes.memmove(buffer.memory.data_ptr() + first, source.data_ptr(), source.nbytes)
            elif is_dense:
                buffer.view(first, source).copy_(source, non_blocking=buffer.is_pinned)
            else:
                fill(buffer.view(first, source), source, wait=not buffer.is_pinned)


def _digests(task: _Task) -> list[str]:
    """The digests of all tensors. Of those that never change, only new ones are copied and digested."""
    memory, digests = bytes_of(task.buffer.memory), []
    rows = zip(task.tensors.items(), task.outline.places, task.outline.ends, strict=True)
    for (name, each), first, end in rows:
        reference, known = task.known.get(first, (None, ""))
        if name.startswith(_SAVED) and reference is not None and reference() is each:
            digests.append(known)
            continue
        if name.startswith(_SAVED) and each.is_cpu:
            _copy([(each, first)], task.buffer)
        digests.append(digest(memory[first:end]))
    return digests


def _sound(task: _Task) -> dict[str, str]:
    """Return the signatures of the live tensors, recorded by name.

    Raises ``CheckpointError`` if the state has changed, see [Note: one state], or must not be kept.
    """
    with ExitStack() as streams:
        for side in task.sides:
            streams.enter_context(side.work())
        if len(task.folds) == 1:  # no update follows, and all copies are complete
            task.folds.append(PendingSignatures(task.live.values()))
        signatures = read_signatures(task.folds)
    for name, *each in zip(task.live, *signatures, strict=True):
        if len(set(each)) > 1:
            raise CheckpointError(f"{name} was changed while it was captured, and not by an update")
    for name in _not_finite(task):
        row = task.state.rows.get(name)
        if row is not None and row.must_be_finite:
            raise CheckpointError(f"{name} has NaN or infinity: such state is not kept")
    return {
        name: recorded(each, signature)
        for (name, each), signature in zip(task.live.items(), signatures[0], strict=True)
    }


def _not_finite(task: _Task) -> list[str]:
    """The names of the live tensors with NaN or infinity."""
    if task.sides:
        names = [*task.live]
        return [names[place] for place in task.folds[0].not_finite]
    rows = zip(task.live.values(), task.outline.places, strict=False)
    copies = [task.buffer.view(first, each) for each, first in rows]
    return [*compress(task.live, not_finite_with_torch(copies).tolist())] if copies else []
