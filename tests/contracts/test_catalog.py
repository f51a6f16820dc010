"""Every contract over every job of the catalog.

Some jobs are tried in ``make test``, more of them in CI, all with ``make test-slow``, and with
``make test-gpu`` those that PyTorch trains on CUDA devices. One of them:
``pytest -m "" tests/contracts -k "resumed and muon-gathering"``; a table of many:
``python -m evaluation.jobs``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.contracts import CONTRACTS, Attempt, wrong_number

QUICK = {
    "healthy": {"nanogpt"},
    "slow_then_flipped": {"nanogpt"},
    "late": {"nanogpt"},
    "killed": {"nanogpt"},
    "diverging": {"nanogpt"},
    "closed": {"nanogpt"},
    "resumed": {"nanogpt"},
}
"""What is tried in ``make test``."""
CI: dict[str, set[str]] = {}
"""What CI tries besides."""
STEPS = int(os.environ.get("SCOUT_JOB_STEPS", "20"))
"""Of a healthy job."""


def marked(contract: str, name: str, *more: str) -> pytest.ParameterSet:
    key = "-".join((name, *more))
    marks = [
        *(
            []
            if key in QUICK.get(contract, ())
            else [pytest.mark.long if key in CI.get(contract, ()) else pytest.mark.slow]
        ),
        pytest.mark.skipif(bool(CATALOG[name].missing), reason=f"needs {', '.join(CATALOG[name].missing)}"),
    ]
    return pytest.param(contract, name, *more, marks=marks, id="-".join((contract, key)))


@pytest.fixture
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "plain"


@pytest.mark.parametrize(("contract", "name"), [marked(each, name) for each in CONTRACTS for name in CATALOG])
def test_contract(contract: str, name: str, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHSCOUT_MEMORY", str(tmp_path / "memory"))
    CONTRACTS[contract](Attempt(name, tmp_path / "run", kept, steps=STEPS))


@pytest.mark.parametrize(
    ("contract", "name", "place"),
    [marked("wrong_number", name, place) for name, entry in CATALOG.items() for place in entry.wrong],
)
def test_a_wrong_number_names_the_rank(contract: str, name: str, place: str, tmp_path: Path, kept: Path):
    wrong_number(Attempt(name, tmp_path / "run", kept), place)
