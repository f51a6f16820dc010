"""Training code of other projects: torchscout never hangs it, never accuses it, and names its faults.

``SCOUT_CLIENT_STEPS=500`` makes the healthy row longer. One client in one row:
``pytest -m slow tests/clients -k "healthy and muon-gathering"``, or ``python -m tests.clients.table``.
"""

from __future__ import annotations

import os

import pytest

from tests.clients.catalog import CLIENTS
from tests.clients.rows import ROWS, run

STEPS = int(os.environ.get("SCOUT_CLIENT_STEPS", "60"))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client(name: str, row: str):
    _require(name)
    result = run(row, name, STEPS)
    assert result.ok, f"{result.words}\n{result.details}"


@pytest.mark.slow_cases("muon-gathering", "nanogpt")
@pytest.mark.long_cases("sharded-by-hand")
@pytest.mark.parametrize("name", [name for name, client in CLIENTS.items() if client.quick])
def test_a_healthy_client_for_a_few_steps(name: str):
    _require(name)
    result = run("healthy", name, 20)
    assert result.ok, f"{result.words}\n{result.details}"


def _require(name: str) -> None:
    if missing := CLIENTS[name].missing:
        pytest.skip(f"needs {', '.join(missing)}")
