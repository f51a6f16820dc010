"""This rank's checkpoints in memory, copied while training goes on (paper, section 8).

Right after an update nothing changes parameters and optimizer state until the next one: so they are copied
meanwhile, and only ``fence``, before that update, waits, if the copy is not done. All else is copied before
``capture`` returns. Digests, header and name follow on a thread of ours. Which state to capture, what to
keep of it and where else to keep it is decided elsewhere; no failure here reaches training.
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

from torchscout.checkpoint.generation import Generation, TrustLevel
from torchscout.checkpoint.snapshot.buffers import BufferPool
from torchscout.checkpoint.snapshot.device_copy import Copies, Stage, TensorCopy
from torchscout.checkpoint.state.training_state import State
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.encoding import bytes_of, name_of
from torchscout.checkpoint.storage.memory import check_budget, memory_folder
from torchscout.checkpoint.storage.shard_format import Outline, ShardIdentity, digest, outline
from torchscout.errors import CheckpointError, describe_error

__all__ = ["Capture", "Snapshots", "check_budget", "memory_folder"]

_FAILURES = (OSError, RuntimeError, ValueError, MemoryError, CheckpointError)
"""What a full file system, a device or too little memory raise."""
_HEADER_GRAIN = 4096


class Capture:
    """One snapshot, under way at first."""

    def __init__(self, identity: ShardIdentity, path: Path) -> None:
        self.identity = identity
        self.path = path
        """Where it is once it is sealed."""
        self.problem: str | None = None
        """Why it is not there, once that is known."""
        self.digests: Mapping[str, str] = {}
        """Of every tensor in it, by name, once it is sealed."""
        self.held_seconds = 0.0
        """How long training has waited for it, in ``capture`` and in ``fence``."""
        self._copied, self._over = threading.Event(), threading.Event()
        self._given_up: str | None = None

    @property
    def is_sealed(self) -> bool:
        return self._over.is_set() and self.problem is None

    def wait(self, seconds: float | None = None) -> bool:
        """Until it is sealed or has failed, so long at most; whether it is sealed."""
        self._over.wait(seconds)
        return self.is_sealed

    def _end(self, problem: str | None) -> None:
        self.problem = problem
        self._copied.set()
        self._over.set()


class _Task(NamedTuple):
    """What is left to be done for a capture when training goes on."""

    capture: Capture
    role: TrustLevel
    state: State
    staged: Mapping[str, torch.Tensor]
    """Copies of what is prompt in the state."""
    versions: Mapping[str, int]
    """Of what is live, as it was captured: PyTorch counts changes."""
    copies: Copies


class Snapshots:
    """The snapshots of one rank. ``capture`` and ``fence`` are for training's thread."""

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
        """``copies`` files are filled in turn, so that all but one are whole; ``limit`` is one's size.

        What is ``protected`` when a capture begins gives way to it only after ``retire``.
        """
        if copies < 2:
            raise ValueError(f"copies must be at least 2, one whole and one being written, got {copies}")
        self._folder, self._rank = Path(folder), rank
        self._limit, self._patience = limit, timeout_seconds
        self._slots = BufferPool(self._folder, rank, copies, protected)
        self._stage = Stage()
        self._header_room = 0
        self._last: Capture | None = None
        self._unfenced: _Task | None = None
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def capture(self, identity: ShardIdentity, role: TrustLevel, state: State) -> Capture:
        """Begin a snapshot of this state, and return once training may go on to its next update."""
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
        capture.held_seconds += time.perf_counter() - begin
        return capture

    def fence(self) -> None:
        """Call before every optimizer update: waits until what the update changes has been copied."""
        task, self._unfenced = self._unfenced, None
        if task is None:
            return
        capture, begin = task.capture, time.perf_counter()
        if capture._copied.wait(self._patience):
            try:
                task.copies.fence()
            except _FAILURES as error:
                capture._given_up = describe_error(error)
        else:
            capture._given_up = f"the state was not copied within {self._patience} s"
        capture.held_seconds += time.perf_counter() - begin

    def prepare(self, size: int) -> None:
        """Allocate memory for a snapshot of about this size beforehand; the first one is then no slower."""
        self._begin(lambda: self._prepare(size))

    @property
    def sealed(self) -> list[Generation]:
        """The generations that are there, oldest first."""
        return self._slots.sealed

    @contextmanager
    def held(self, generation: Generation) -> Iterator[Path | None]:
        """Read a snapshot in this block, if it is there: its file is not reused meanwhile."""
        path = self._slots.hold(generation)
        try:
            yield path
        finally:
            if path is not None:
                self._slots.release(generation)

    def retire(self, generation: Generation) -> None:
        """This one is not needed any more."""
        self._slots.retire(generation)

    def close(self) -> None:
        """Let a capture that is under way end, and give back all but what is sealed. Idempotent."""
        if not self._closed:
            self._closed = True
            self._work.put(None)
            if self._thread is not None:
                self._thread.join(self._patience)
            if self._thread is None or not self._thread.is_alive():
                self._slots.close()

    def _refuse(self, state: State) -> None:
        if self._closed:
            raise CheckpointError("the snapshots are closed")
        if self._limit is not None and state.bytes > self._limit:
            raise CheckpointError(f"the state has {state.bytes} bytes, a snapshot may have {self._limit}")
        # Sealing takes a while; captures that come faster than that wait for it.
        if self._last is not None and not self._last._over.wait(self._patience):
            raise CheckpointError(f"the snapshot of {self._last.identity.generation} is not done yet")

    def _begin(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="torchscout-snapshot", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it refers to training's tensors

    def _prepare(self, size: int) -> None:
        with suppress(*_FAILURES):  # the next capture will meet it, too, and say so
            self._slots.prepare(size)

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
        """Seal the snapshot, or leave nothing of it; its size."""
        slot, is_sealed = self._slots.take(), False
        try:
            laid_out = self._laid_out(task)
            memory = slot.memory(laid_out.size)
            _fill(memory, laid_out, task, task.copies.devices is not None and slot.pin())
            self._slots.seal(slot, task.capture.identity)
            is_sealed = True
            return laid_out.size
        finally:
            if not is_sealed:
                self._slots.discard(slot)

    def _laid_out(self, task: _Task) -> Outline:
        """Always alike, if the tensors are: then the slots' memory stays as it is."""
        tensors = {**task.staged, **task.state.live}
        described = [(name, name_of(each.dtype), tuple(each.shape)) for name, each in tensors.items()]
        for _ in range(2):
            laid_out = outline(
                task.capture.identity, task.role, task.state.document, described, self._header_room
            )
            if laid_out.header_bytes == self._header_room:
                break
            # A little more than is needed: numbers in it have more or fewer digits each time.
            self._header_room = -(-laid_out.header_bytes * 9 // 8 // _HEADER_GRAIN) * _HEADER_GRAIN
        return laid_out


def _fill(memory: torch.Tensor, laid_out: Outline, task: _Task, pinned: bool) -> None:
    """Everything into its place, what training waits for first, the header last."""
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
