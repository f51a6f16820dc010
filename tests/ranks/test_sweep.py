"""Jobs that were killed replay everything before they go on, and what that shows decides what they load.

Two cycles of two accepted checks verify a checkpoint here, so that the latest one is newer than that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint_jobs import Plan, Result, train
from tests.support.ranks import RankError, run_ranks
from torchscout.checkpoint.gate import SweepResult, TrustLevel
from torchscout.faults.plan import FaultPlan

RANKS = 3
FAULTY = FaultPlan().scale(rank=1, at="stack.1/output", step=1, factor=1.5, calls=None)
"""In the first step of a process, and in what is replayed before it."""


@pytest.fixture
def killed(tmp_path: Path) -> Plan:
    """A job that ended in the middle of step 9."""
    plan = Plan(
        "ddp",
        10,
        interval=1,
        recipes=2,
        directory=tmp_path / "checkpoints",
        run_dir=tmp_path / "run",
        memory=tmp_path / "memory",
    )
    with pytest.raises(RankError):
        run_ranks(train, RANKS, replace(plan, killed=dict.fromkeys(range(RANKS), 9)), timeout=120)
    return plan


def gone_on(plan: Plan) -> list[Result]:
    results = run_ranks(train, RANKS, plan, timeout=120)
    assert all(each.unfired == 0 for each in results)
    return results


def test_a_clean_sweep_confirms_the_latest(killed: Plan):
    for each in gone_on(killed):
        assert each.resumed is not None
        assert (each.resumed.swept, each.resumed.unswept) == (SweepResult.CLEAN, None), each.resumed
        assert each.resumed.role is TrustLevel.LATEST
        assert each.resumed.step in (7, 8)
        assert "the sweep of the catalog was clean" in each.resumed.reason
        assert each.failures == each.incidents == []


def test_a_rank_that_computes_wrong_numbers_is_named_and_the_verified_state_loaded(killed: Plan):
    results = gone_on(replace(killed, steps=0, faults=FAULTY))
    for each in results:
        assert each.resumed is not None
        assert (each.resumed.swept, each.resumed.role) == (SweepResult.SDC, TrustLevel.VERIFIED), each.resumed
        assert each.resumed.step in (2, 4, 6)
        assert "the sweep of the catalog found corruption" in each.resumed.reason
        assert each.status["verified"] == each.status["latest"] == each.resumed.step
    assert results[0].named == [(1,)]
    assert {manifestation for manifestation, _ in results[0].incidents} == {"sdc"}


def test_a_job_that_does_not_sweep_loads_the_verified_state(killed: Plan):
    for each in gone_on(replace(killed, sweep=False)):
        assert each.resumed is not None
        assert (each.resumed.swept, each.resumed.role) == (None, TrustLevel.VERIFIED)
        assert each.resumed.step in (2, 4, 6)
        assert "the sweep of the catalog did not complete" in each.resumed.reason
