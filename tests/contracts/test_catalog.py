"""Every contract over every job of the catalog.

Some jobs are tried in ``make test``, more of them in CI, all with ``make test-slow``, and with
``make test-gpu`` those that PyTorch trains on CUDA devices. One of them:
``pytest -m "" tests/contracts -k "resumed and muon-gathering"``; a table of many:
``python -m evaluation.jobs``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.contracts import CONTRACTS, Attempt, ContractError, wrong_number

STEPS = int(os.environ.get("SCOUT_JOB_STEPS", "20"))
"""Of a healthy job."""


def cases(contract: str, name: str, *more: str) -> list[Any]:
    """The contract on this job, on the CPU and where it says so on CUDA devices."""
    entry, key = CATALOG[name], ":".join((contract, *more))
    when = [] if key in entry.in_test else [pytest.mark.long if key in entry.in_ci else pytest.mark.slow]
    here = pytest.mark.skipif(bool(entry.missing), reason=f"needs {', '.join(entry.missing)}")
    if why := entry.wrong_today.get(key):
        when.append(pytest.mark.xfail(strict=True, raises=ContractError, reason=f"wrong today: {why}"))
    found = [pytest.param(contract, name, *more, "gloo", marks=[here, *when], id=f"{key}-{name}")]
    if key in entry.on_cuda:
        marks = [here, pytest.mark.gpu, pytest.mark.nccl(entry.ranks)]
        found.append(pytest.param(contract, name, *more, "nccl", marks=marks, id=f"{key}-{name}-nccl"))
    return found


@pytest.fixture
def job(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Attempt]:
    """Make an attempt on a job; all workers of a session share what jobs without torchscout leave."""
    monkeypatch.setenv("TORCHSCOUT_MEMORY", str(tmp_path / "memory"))
    base = tmp_path_factory.getbasetemp()
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "plain"
    return lambda name, backend: Attempt(name, tmp_path / "run", kept, backend, STEPS)


@pytest.mark.parametrize(
    ("contract", "name", "backend"),
    [case for contract in CONTRACTS for name in CATALOG for case in cases(contract, name)],
)
def test_contract(contract: str, name: str, backend: str, job: Callable[..., Attempt]):
    CONTRACTS[contract](job(name, backend))


@pytest.mark.parametrize(
    ("contract", "name", "what", "backend"),
    [
        case
        for name, entry in CATALOG.items()
        for what in entry.wrong
        for case in cases("wrong_number", name, what)
    ],
)
def test_a_wrong_number_names_the_rank(
    contract: str, name: str, what: str, backend: str, job: Callable[..., Attempt]
):
    wrong_number(job(name, backend), what)
