"""Marks tests by the lists next to this file.

``slow_variants.txt``: CI runs a quicker test of the same kind. ``long_tests.txt``: tests that take about
nine seconds, elapsed or of CPU time. They run in CI; with them, ``make test`` would take more than 12
minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
MARKED = {
    "slow": {*(HERE / "slow_variants.txt").read_text().splitlines()},
    "long": {*(HERE / "long_tests.txt").read_text().splitlines()},
}


@pytest.hookimpl(tryfirst=True)  # before they are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark, names in MARKED.items():
            if item.nodeid in names:
                item.add_marker(mark)
