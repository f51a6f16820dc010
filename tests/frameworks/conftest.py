"""Live ranks that answer with a module's own ``answering`` and stay while they are fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.ranks import LiveRanks, are_fit


@pytest.fixture(scope="module")
def live_ranks(request: pytest.FixtureRequest) -> Iterator[Callable[[int], LiveRanks]]:
    kept: dict[int, LiveRanks] = {}

    def of_size(size: int) -> LiveRanks:
        if size in kept and not are_fit(kept[size]):
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
