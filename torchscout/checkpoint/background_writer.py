"""Writes sealed snapshots to files and passes them on for replication, in the background (paper, section 8).

One thread writes files in order. Replication runs meanwhile; files wait only for copies that belong in files
themselves. Nothing blocks or raises into training: failures are reported by ``problems``, and
``is_written`` says whether files are complete.
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

from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.replication.replicator import Replicator
from torchscout.checkpoint.snapshot import Capture, Snapshots
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.inventory import Member
from torchscout.checkpoint.storage.shard_format import ShardIdentity
from torchscout.errors import CheckpointError
from torchscout.utils.private_files import open_to_read

__all__ = ["BackgroundWriter"]

_LOOK_SECONDS = 0.02
_SILENCE_SECONDS = 30.0
"""How long an expected copy may make no progress before it is given up."""
_MOST_DOUBLINGS = 4
"""Limit of the backoff: 2**4 snapshots are not replicated after copies that came too late."""


@dataclass(slots=True)
class _Expected:
    """A copy of another rank's state that is written to a file here as soon as it has arrived."""

    identity: ShardIdentity
    progressed: float
    """When bytes of it last arrived."""


class BackgroundWriter:
    """Writes and replicates snapshots once they are sealed."""

    def __init__(
        self,
        member: Member,
        memory: Path,
        disk: Path,
        snapshots: Snapshots,
        replicator: Replicator | None,
        held_ranks: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        self._member, self._memory, self._disk = member, memory, disk
        self._snapshots, self._replicator, self._held_ranks = snapshots, replicator, held_ranks
        self._timeout = timeout_seconds
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._pending: set[Generation] = set()
        """Queued."""
        self._copying: set[Generation] = set()
        """Being replicated."""
        self._late, self._passed_over = 0, 0
        """Copies given up since the last that arrived, and snapshots not replicated because of that."""
        self._expected: list[_Expected] = []
        self._written: dict[Generation, str | None] = {}
        """For each due generation, why it could not be written; None if it was written."""
        self._problems: deque[str] = deque()
        self._thread = threading.Thread(target=self._run, name="torchscout-outgoing", daemon=True)
        self._thread.start()

    def take(self, capture: Capture, *, is_due: bool) -> None:
        """Replicate this snapshot once it is sealed, and write it to files if it is due.

        One that is not due is skipped if replication cannot keep up.
        """
        if is_due:
            self._written.clear()  # nobody asks for older ones any more
        if is_due or self._has_time():
            self._pending.add(capture.identity.generation)
            self._tasks.put(lambda: self._process(capture, is_due))

    def later(self, work: Callable[[], object]) -> None:
        """Run this after what was queued before it; a failure is reported by ``problems``."""
        self._tasks.put(lambda: self._attempt(work))

    def flush(self, generations: Sequence[Generation], seconds: float) -> str | None:
        """Write these to files, in this order, with the copies of other ranks' state that are here.

        Returns the first failure, in words, or None; taking longer than ``seconds`` is one. Thread-safe.
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
        for rank in self._held_ranks:
            identity = self._member.at(generation, rank)
            held, target = (shards.path_of(each, identity, me) for each in (self._memory, self._disk))
            if held.exists() and not target.exists():
                _copy(held, target)

    def is_written(self, generation: Generation) -> bool:
        """Whether this generation's files are sealed; raises ``CheckpointError`` if writing failed."""
        if generation not in self._written:
            return False
        if (problem := self._written[generation]) is not None:
            raise CheckpointError(problem)
        return True

    def problems(self) -> list[str]:
        """Return and clear what went wrong since the last call."""
        said = [] if self._replicator is None else self._replicator.problems()
        while self._problems:
            said.append(self._problems.popleft())
        return said

    def close(self) -> None:
        """Finish the queue, within bounds."""
        self._tasks.put(None)
        self._thread.join(min(self._timeout, 10.0))

    def _has_time(self) -> bool:
        """Whether a copy could arrive before it is obsolete."""
        if self._pending or self._copying:
            return False
        self._passed_over += 1
        return self._passed_over >= 1 << min(self._late, _MOST_DOUBLINGS)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task  # it may keep a snapshot alive

    def _next(self) -> Callable[[], object] | None:
        try:
            return self._tasks.get(timeout=_LOOK_SECONDS if self._expected else None)
        except Empty:
            return self._look_for_copies

    def _process(self, capture: Capture, is_due: bool) -> None:
        generation = capture.identity.generation
        problem = self._attempt(lambda: self._carry(capture, is_due))
        if is_due and problem is not None:
            self._written[generation] = problem
        self._pending.discard(generation)

    def _attempt(self, work: Callable[[], object]) -> str | None:
        try:
            work()
        except (CheckpointError, OSError) as error:
            self._problems.append(str(error))
            return str(error)
        return None

    def _carry(self, capture: Capture, is_due: bool) -> None:
        """Replicate a snapshot, and write it to files if it is due."""
        generation = capture.identity.generation
        if not capture.wait(self._timeout):
            raise CheckpointError(f"{generation} was not captured: {capture.problem or 'it takes too long'}")
        with self._snapshots.held(generation) as path:
            if path is None and not is_due:
                return  # a newer one has replaced it
            if path is None:
                raise CheckpointError(f"{generation} is no longer in memory")
            if self._replicator is not None and self._replicator.holder is not None:
                self._send(self._replicator, generation)
            if is_due:
                _copy(path, shards.path_of(self._disk, capture.identity, self._member.rank))
                self._expect_copies(generation)

    def _send(self, replicator: Replicator, generation: Generation) -> None:
        """Replicate it; its buffer is not reused until that is over."""
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

    # [Note: written includes copies]
    #
    # If every machine has its own disk, losing a machine loses its files, and copies in memory are deleted
    # as soon as files count as written. So files count as written only when the copies are in files, too.

    def _expect_copies(self, generation: Generation) -> None:
        now = time.monotonic()
        self._expected += [_Expected(self._member.at(generation, rank), now) for rank in self._held_ranks]
        self._look_for_copies()
        self._settle(generation)

    def _look_for_copies(self) -> None:
        """Write copies that have arrived; give up those that make no progress.

        Either failure means that the generation is not in files. The next one that is due may be.
        """
        for each in list(self._expected):
            rank, generation = each.identity.rank, each.identity.generation
            held = shards.path_of(self._memory, each.identity, self._member.rank)
            if held.exists():
                target = shards.path_of(self._disk, each.identity, self._member.rank)
                problem = self._attempt(partial(_copy, held, target))
            elif self._may_come(each):
                continue
            else:
                problem = f"the copy of rank {rank}'s {generation} did not arrive"
                self._problems.append(problem)
            self._expected.remove(each)
            self._settle(generation, problem)

    def _may_come(self, expected: _Expected) -> bool:
        now = time.monotonic()
        if self._replicator is not None and expected.identity in self._replicator.arriving():
            expected.progressed = now
        return now - expected.progressed < min(self._timeout, _SILENCE_SECONDS)

    def _settle(self, generation: Generation, problem: str | None = None) -> None:
        if problem is not None:
            self._written[generation] = problem
        elif all(each.identity.generation != generation for each in self._expected):
            self._written.setdefault(generation, None)


def _copy(source: Path, target: Path) -> None:
    """Write the shard in this file, which may be longer, to another file."""
    size = shards.inspect(source).size
    with (
        open_to_read(source) as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as shard,
    ):
        shards.write(target, [shard])
