"""Agreement of all ranks through the job's store, in bounded time and without a collective.

Ranks of a job that torchscout did not write may take different ways: only some may have been started by
`scout run`, or only some may ever update a model. A collective would then block those that do. Here the last
rank to arrive decides *yes*, or the first one whose time is up decides *no*, by one atomic operation.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Agreement", "agree"]

_POLL_SECONDS = 0.05
_YES = "yes"


@dataclass(frozen=True, slots=True)
class Agreement:
    """The same on all ranks that have taken part."""

    problem: str | None
    """Why the ranks do not go on together; None if they do."""
    document: Any = None
    """Rank 0's, if they do."""
    is_logged_here: bool = False
    """Whether this is the rank that logs the problem."""


def agree(
    store: Store, rank: int, size: int, seconds: float, *, problem: str | None = None, document: Any = None
) -> Agreement:
    """Wait until all ranks are here, for at most ``seconds``. One rank's ``problem`` is everybody's."""
    if rank == 0:
        store.set("document", json.dumps(document))
    if problem is not None:
        store.compare_set("decision", "", json.dumps([rank, problem]))
    elif store.add("arrived", 1) == size:
        store.compare_set("decision", "", _YES)
    deadline = time.monotonic() + seconds
    while not store.check(["decision"]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    arrived = store.add("arrived", 0)
    late = f"after {seconds:g} s only {arrived} of {size} ranks were there"
    decision = store.compare_set("decision", "", json.dumps([rank, late])).decode()
    if decision == _YES:
        return Agreement(None, json.loads(store.get("document")))
    decider, agreed = json.loads(decision)
    return Agreement(agreed, is_logged_here=decider == rank)
