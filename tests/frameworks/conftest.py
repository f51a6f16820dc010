"""Live ranks that stay for a whole module, and answer with its own ``answering``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import LiveRanks


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest) -> Iterator[LiveRanks]:
    with LiveRanks(request.module.answering, 4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def six(request: pytest.FixtureRequest) -> Iterator[LiveRanks]:
    with LiveRanks(request.module.answering, 6) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def eight(request: pytest.FixtureRequest) -> Iterator[LiveRanks]:
    with LiveRanks(request.module.answering, 8) as ranks:
        yield ranks
