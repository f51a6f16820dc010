"""Live ranks that answer with a module's own ``answering``, and stay for all tests of it while they are fit.

Trainers of frameworks leave process groups behind, and Gloo has threads for each that wake up a hundred
times a second: ranks with a thousand of them slow down whatever else this machine runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ranks import LiveRanks

_MOST_THREADS = 150


@pytest.fixture(scope="module")
def live_ranks(request: pytest.FixtureRequest) -> Iterator[Callable[[int], LiveRanks]]:
    kept: dict[int, LiveRanks] = {}

    def of_size(size: int) -> LiveRanks:
        if size in kept and not _are_fit(kept[size]):
            kept.pop(size).close()
        if size not in kept:
            kept[size] = LiveRanks(request.module.answering, size)
        return kept[size]

    yield of_size
    for ranks in kept.values():
        ranks.close()


@pytest.fixture
def four(live_ranks: Callable[[int], LiveRanks]) -> LiveRanks:
    return live_ranks(4)


@pytest.fixture
def six(live_ranks: Callable[[int], LiveRanks]) -> LiveRanks:
    return live_ranks(6)


@pytest.fixture
def eight(live_ranks: Callable[[int], LiveRanks]) -> LiveRanks:
    return live_ranks(8)


def _are_fit(ranks: LiveRanks) -> bool:
    try:
        tasks = [Path(f"/proc/{rank.process.pid}/task") for rank in ranks._ranks]
        return all(len([*each.iterdir()]) <= _MOST_THREADS for each in tasks)
    except OSError:  # one has ended: a test before this one has failed
        return False
