"""Marks the tests in ``slow_variants.txt`` as slow: ``make test`` has a quicker one of the same kind."""

from __future__ import annotations

from pathlib import Path

import pytest

SLOW = set((Path(__file__).parent / "slow_variants.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)  # before they are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
