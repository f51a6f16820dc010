"""Sealed snapshots on their way from memory: to another machine's, and into files (paper, section 8).

One thread does both, one snapshot at a time, so that at most one is kept from being reused. Nothing here
waits or raises into training: what did not work is a sentence, and whether files are there is asked for.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from torchscout.checkpoint import shards
from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.inventory import Member
from torchscout.checkpoint.replicate import Replicator
from torchscout.checkpoint.snapshot import Capture, Snapshots
from torchscout.errors import CheckpointError

__all__ = ["Outgoing"]

_LOOK_SECONDS = 0.02


class _Task(NamedTuple):
    capture: Capture
    is_due: bool
    """Whether it goes into files."""


class Outgoing:
    """What becomes of snapshots once they are sealed."""

    def __init__(
        self,
        member: Member,
        memory: Path,
        disk: Path,
        snapshots: Snapshots,
        replicator: Replicator | None,
        wards: Sequence[int],
        patience_seconds: float,
    ) -> None:
        self._member, self._memory, self._disk = member, memory, disk
        self._snapshots, self._replicator, self._wards = snapshots, replicator, wards
        self._patience = patience_seconds
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._pending: set[Generation] = set()
        """Taken, and not yet elsewhere."""
        self._written: dict[Generation, str | None] = {}
        """Of what was due: why it could not be written, or None if it was."""
        self._problems: deque[str] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="torchscout-outgoing", daemon=True)
        self._thread.start()

    def take(self, capture: Capture, *, is_due: bool) -> None:
        """Copy this one elsewhere when it is sealed. One that is not due for files may be passed over."""
        if is_due or not self._pending:
            self._pending.add(capture.identity.generation)
            self._tasks.put(lambda: self._try(_Task(capture, is_due)))

    def later(self, work: Callable[[], object]) -> None:
        """Do this after what was begun before it; files are slow. A failure is a problem."""
        self._tasks.put(lambda: self._attempt(work))

    def is_written(self, generation: Generation) -> bool:
        """Whether its files are sealed; ``CheckpointError`` if they could not be."""
        if generation not in self._written:
            return False
        if (problem := self._written[generation]) is not None:
            raise CheckpointError(problem)
        return True

    def problems(self) -> list[str]:
        """What went wrong since the last call."""
        said = [] if self._replicator is None else self._replicator.problems()
        while self._problems:
            said.append(self._problems.popleft())
        return said

    def close(self) -> None:
        """Let what is under way end, within bounds."""
        self._closing = True
        self._tasks.put(None)
        self._thread.join(min(self._patience, 10.0))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it may refer to a snapshot

    def _try(self, task: _Task) -> None:
        generation = task.capture.identity.generation
        problem = self._attempt(lambda: self._carry(task))
        if task.is_due:  # what fails after its own files are sealed concerns copies only
            self._written.setdefault(generation, problem)
        self._pending.discard(generation)

    def _attempt(self, work: Callable[[], object]) -> str | None:
        try:
            work()
        except (CheckpointError, OSError) as error:
            self._problems.append(str(error))
            return str(error)
        return None

    def _carry(self, task: _Task) -> None:
        generation = task.capture.identity.generation
        if not task.capture.wait(self._patience):
            raise CheckpointError(f"{generation} was not captured: {task.capture.problem or 'it takes long'}")
        with self._snapshots.held(generation) as path:
            if path is None:
                raise CheckpointError(f"{generation} is not in memory any more")
            if self._replicator is not None and self._replicator.holder is not None:
                self._replicator.send(path)
            if task.is_due:
                _copy(path, shards.path_of(self._disk, task.capture.identity, self._member.rank))
                self._written[generation] = None
                self._copy_replicas(generation)
            self._await_replica(generation)

    def _copy_replicas(self, generation: Generation) -> None:
        """What this rank holds for others, as far as it has come; their own files do not depend on it."""
        for ward in self._wards:
            identity = self._member.at(generation, ward)
            held = shards.path_of(self._memory, identity, self._member.rank)
            if self._until(held.exists):
                _copy(held, shards.path_of(self._disk, identity, self._member.rank))
            else:
                self._problems.append(f"the copy of rank {ward}'s {generation} has not come")

    def _await_replica(self, generation: Generation) -> None:
        """So long its file must not be reused."""
        replicator = self._replicator
        if replicator is not None and replicator.holder is not None:
            self._until(lambda: generation in replicator.held())

    def _until(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + min(self._patience, 30.0)
        while not condition():
            if self._closing or time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True


def _copy(source: Path, target: Path) -> None:
    with (
        source.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as whole,
    ):
        shards.write(target, [whole])
