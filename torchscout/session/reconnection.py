"""How all ranks agree on a step at which they reconnect after a failed check, without waiting.

[Note: a step that all ranks agree on] Ranks notice that a check has failed at different times: one has timed
out in it, others find their connections closed, and a rank whose part of the check succeeded notices only at
its next check. Training goes on meanwhile, and no rank may wait for another one in it. So nothing is
exchanged by collectives. Ranks write to the job's store, which answers at once, and look there after each
step:

1. A rank whose check has failed *leaves*. The last one to leave proposes a later step.
2. A rank that sees the proposal before that step accepts it.
3. At that step each rank decides: *go* if all ranks have accepted, otherwise not. The first decision counts.
   The store compares and sets it in one operation, so that all ranks read the same one, and all reconnect at
   the same step or none does. *Go* is possible only if every rank knew of the step before it got there.

If it is not *go*, the same is tried at a later step, which all ranks derive from the proposal. A rank that is
gone, or is so late that it never leaves or accepts, keeps the others from reconnecting and from nothing else.

The store's own thread in another process may be stopped or unreachable. Its requests are therefore made by a
thread of their own, and training's thread waits for an answer for a bounded time.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torchscout.errors import ChannelError
from torchscout.utils.unlisted_groups import Store

__all__ = ["Proposal", "Reconnection"]

_ANSWER_SECONDS = 5.0
_Result = TypeVar("_Result")


class Proposal(NamedTuple):
    """The first step at which to reconnect."""

    step: int | None
    """None: the ranks have tried often enough, and do not try again."""
    attempt: int
    """The number of the attempt at that step, the first being 1."""


class Reconnection:
    """The ranks that have left the groups of one connection. All methods raise ``ChannelError`` if the store
    does not answer."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """``store`` is used for this reconnection only, by all ranks."""
        self._rank, self._size = rank, size
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]
        self._requests = queue.SimpleQueue()
        # Another connection than training's, which may be in use for longer.
        self._store = store.clone()
        threading.Thread(target=self._run, name="torchscout-store", daemon=True).start()

    def leave(self, reason: str, proposal: Proposal) -> None:
        """Write that this rank's check has failed. The proposal of the last rank that leaves counts."""

        def leave() -> None:
            self._store.compare_set("reason", "", f"rank {self._rank}: {reason}")
            if self._store.add("left", 1) == self._size:
                self._store.set("proposal", json.dumps(proposal))

        self._ask(leave)

    def proposal(self) -> Proposal | None:
        """Return the proposal; None until all ranks have left."""

        def look() -> Proposal | None:
            if not self._store.check(["proposal"]):
                return None
            return Proposal(*json.loads(self._store.get("proposal")))

        return self._ask(look)

    def accept(self, attempt: int) -> None:
        """Write that this rank will come to the step of this attempt, which it has not reached yet."""
        self._ask(lambda: self._store.add(f"{attempt}/accepted", 1))

    def is_go(self, attempt: int) -> bool:
        """Return whether all ranks reconnect; the same on every rank. Called at the step of this attempt."""

        def decide() -> bool:
            go = self._store.add(f"{attempt}/accepted", 0) == self._size
            decision: bytes = self._store.compare_set(f"{attempt}/decision", "", "go" if go else "no")
            return decision == b"go"

        return self._ask(decide)

    def first_reason(self) -> str:
        """Return why the first rank has left."""
        return self._ask(lambda: str(self._store.get("reason").decode(errors="replace")))

    def reporter(self) -> int:
        """Return the rank that reports the end of all attempts: the first that asks."""
        return self._ask(lambda: int(self._store.compare_set("reporter", "", str(self._rank))))

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._requests.put((SystemExit, queue.SimpleQueue()))

    def _ask(self, request: Callable[[], _Result]) -> _Result:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put((request, answers))
        try:
            is_answer, answer = answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise ChannelError(f"the job's store did not answer within {_ANSWER_SECONDS:g} s") from None
        if not is_answer:
            raise ChannelError(f"the job's store failed: {answer}") from answer
        result: _Result = answer
        return result

    def _run(self) -> None:
        while True:
            request, answers = self._requests.get()
            if request is SystemExit:
                return
            try:
                answers.put((True, request()))
            except RuntimeError as error:  # all errors of stores
                answers.put((False, error))
