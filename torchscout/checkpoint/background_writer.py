"""Sealed snapshots on their way from memory: to another machine's, and into files (paper, section 8).

One thread writes files, in order; copies go their own way meanwhile, and files wait for no copy but one that
is to be in files, too. Nothing here waits or raises into training: what did not work is a sentence, and
whether files are there is asked for.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from torchscout.checkpoint.generation import Generation
from torchscout.checkpoint.replication.replicator import Replicator
from torchscout.checkpoint.snapshot.snapshots import Capture, Snapshots
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.inventory import Member
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.errors import CheckpointError

__all__ = ["BackgroundWriter"]

_LOOK_SECONDS = 0.02
_SILENCE_SECONDS = 30.0
"""At most so long nothing may come of a copy that is waited for."""
_MOST_DOUBLINGS = 4
"""Of the snapshots that are passed over, each time that a copy comes too late."""


class _Task(NamedTuple):
    capture: Capture
    is_due: bool
    """Whether it goes into files."""


@dataclass(slots=True)
class _Expected:
    """A copy of another rank's state that is to be written to a file here as soon as it has come."""

    identity: ShardIdentity
    heard: float
    """When something of it was on its way last."""


class BackgroundWriter:
    """What becomes of snapshots once they are sealed."""

    def __init__(
        self,
        member: Member,
        memory: Path,
        disk: Path,
        snapshots: Snapshots,
        replicator: Replicator | None,
        wards: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        self._member, self._memory, self._disk = member, memory, disk
        self._snapshots, self._replicator, self._wards = snapshots, replicator, wards
        self._patience = timeout_seconds
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._pending: set[Generation] = set()
        """Taken, and not yet looked at."""
        self._copying: set[Generation] = set()
        """On their way to another machine."""
        self._late, self._passed_over = 0, 0
        """Copies given up since the last that arrived, and snapshots not copied because of that."""
        self._expected: list[_Expected] = []
        self._written: dict[Generation, str | None] = {}
        """Of what was due: why it could not be written, or None if it was."""
        self._problems: deque[str] = deque()
        self._thread = threading.Thread(target=self._run, name="torchscout-outgoing", daemon=True)
        self._thread.start()

    def take(self, capture: Capture, *, is_due: bool) -> None:
        """Copy this one elsewhere when it is sealed. One that is not due for files may be passed over."""
        if is_due or self._has_time():
            self._pending.add(capture.identity.generation)
            self._tasks.put(lambda: self._try(_Task(capture, is_due)))

    def later(self, work: Callable[[], object]) -> None:
        """Do this after what was begun before it; files are slow. A failure is a problem."""
        self._tasks.put(lambda: self._attempt(work))

    def flush(self, generations: Sequence[Generation], seconds: float) -> str | None:
        """Write these to files, in this order, with the copies of other ranks' state that are here.

        Returns why one could not be, also if it is not done in time. Any thread may call.
        """
        is_over = threading.Event()
        problems: list[str] = []

        def write_all() -> None:
            problems.extend(filter(None, (self._attempt(partial(self._put, each)) for each in generations)))
            is_over.set()

        self._tasks.put(write_all)
        if not is_over.wait(seconds):
            return f"not within {seconds:g} s"
        return problems[0] if problems else None

    def _put(self, generation: Generation) -> None:
        me = self._member.rank
        own = shards.path_of(self._disk, self._member.at(generation), me)
        with self._snapshots.held(generation) as path:
            if path is not None and not own.exists():
                _copy(path, own)
        if not own.exists():
            raise CheckpointError(f"{generation} is not in memory")
        for ward in self._wards:
            identity = self._member.at(generation, ward)
            held, target = (shards.path_of(each, identity, me) for each in (self._memory, self._disk))
            if held.exists() and not target.exists():
                _copy(held, target)

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
        self._tasks.put(None)
        self._thread.join(min(self._patience, 10.0))

    def _has_time(self) -> bool:
        """Whether a copy could arrive before it is not needed any more; what is due is needed for longer."""
        if self._pending or self._copying:
            return False
        self._passed_over += 1
        return self._passed_over >= 1 << min(self._late, _MOST_DOUBLINGS)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task  # it may refer to a snapshot

    def _next(self) -> Callable[[], object] | None:
        try:
            return self._tasks.get(timeout=_LOOK_SECONDS if self._expected else None)
        except Empty:
            return self._look_for_copies

    def _try(self, task: _Task) -> None:
        generation = task.capture.identity.generation
        problem = self._attempt(lambda: self._carry(task))
        if task.is_due and problem is not None:
            self._written[generation] = problem
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
            if path is None and not task.is_due:
                return  # a newer one has replaced it, and is copied instead
            if path is None:
                raise CheckpointError(f"{generation} is not in memory any more")
            if self._replicator is not None and self._replicator.holder is not None:
                self._send(self._replicator, generation)
            if task.is_due:
                _copy(path, shards.path_of(self._disk, task.capture.identity, self._member.rank))
                self._expect_copies(generation)

    def _send(self, replicator: Replicator, generation: Generation) -> None:
        """Until that is over its file must not be reused."""
        hold = ExitStack()
        path = hold.enter_context(self._snapshots.held(generation))

        def over(is_copied: bool) -> None:
            hold.close()
            self._late, self._passed_over = 0 if is_copied else self._late + 1, 0
            self._copying.discard(generation)

        self._copying.add(generation)
        if path is None:
            over(False)
        else:
            replicator.send(path, over)

    # [Note: written means copied, too]
    #
    # Where every machine has a disk of its own, a lost one takes its files along, and what others hold of its
    # state in memory goes as soon as files are said to be written. So they are when the copies are in files.

    def _expect_copies(self, generation: Generation) -> None:
        now = time.monotonic()
        self._expected += [_Expected(self._member.at(generation, ward), now) for ward in self._wards]
        self._look_for_copies()
        self._settle(generation)

    def _look_for_copies(self) -> None:
        """Write what has come; what does not come is given up: own files do not depend on it."""
        for each in list(self._expected):
            held = shards.path_of(self._memory, each.identity, self._member.rank)
            if held.exists():
                target = shards.path_of(self._disk, each.identity, self._member.rank)
                self._attempt(partial(_copy, held, target))
            elif self._may_come(each):
                continue
            else:
                rank, generation = each.identity.rank, each.identity.generation
                self._problems.append(f"the copy of rank {rank}'s {generation} has not come")
            self._expected.remove(each)
            self._settle(each.identity.generation)

    def _may_come(self, expected: _Expected) -> bool:
        now = time.monotonic()
        if self._replicator is not None and expected.identity in self._replicator.arriving():
            expected.heard = now
        return now - expected.heard < min(self._patience, _SILENCE_SECONDS)

    def _settle(self, generation: Generation) -> None:
        if all(each.identity.generation != generation for each in self._expected):
            self._written[generation] = None


def _copy(source: Path, target: Path) -> None:
    with (
        source.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as whole,
    ):
        shards.write(target, [whole])
