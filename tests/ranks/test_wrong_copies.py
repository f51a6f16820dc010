"""Numbers that go wrong after they were checked, and before or while they are captured.

A check certifies what is captured after it. That peers have captured the same is seen at the next check, or
by who loads it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint_jobs import Plan, Result, train
from tests.support.ranks import RankError, run_ranks
from torchscout.checkpoint.gate import TrustLevel
from torchscout.faults.plan import FaultPlan

RANKS = 3
FLIP = FaultPlan().flip_bit(rank=1, at="head/weight", step=5, bit=20)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(
        "ddp",
        6,
        interval=1,
        directory=tmp_path / "checkpoints",
        run_dir=tmp_path / "run",
        memory=tmp_path / "memory",
        faults=FLIP,
        after_checks=True,
    )


def gone_on(plan: Plan) -> list[Result]:
    return run_ranks(train, RANKS, replace(plan, steps=0, faults=FaultPlan()), timeout=120)


def test_a_wrong_copy_is_found_by_the_next_check_and_given_up(plan: Plan):
    results = run_ranks(train, RANKS, plan, timeout=120)
    assert all(each.unfired == 0 for each in results)
    assert {(manifestation, step) for manifestation, step in results[0].incidents} == {("sdc", 6)}
    assert set(results[0].named) == {(1,)}
    for each in results:
        assert (each.status["poisoned"], each.status["verified"]) == (6, 4)
    for each in gone_on(plan):
        assert each.resumed is not None
        assert (each.resumed.step, each.resumed.role) == (4, TrustLevel.VERIFIED)
        assert each.incidents == results[0].incidents, "nothing new"


def test_a_wrong_copy_is_found_when_it_is_loaded_and_the_previous_one_is_used(plan: Plan):
    with pytest.raises(RankError):
        run_ranks(train, RANKS, replace(plan, killed=dict.fromkeys(range(RANKS), 6)), timeout=120)
    results = gone_on(plan)
    assert set(results[0].named) == {(1,)}
    assert {manifestation for manifestation, _ in results[0].incidents} == {"sdc"}
    for each in results:
        assert each.resumed is not None
        assert (each.resumed.step, each.resumed.role) == (4, TrustLevel.VERIFIED)
        assert each.status["verified"] == 4


def test_two_copies_that_differ_are_not_trusted_though_nobody_can_be_named(plan: Plan):
    results = run_ranks(train, 2, plan, timeout=120)
    assert {(manifestation, step) for manifestation, step in results[0].incidents} == {("sdc", 6)}
    assert set(results[0].named) == {(0, 1)}
    assert {each.status["verified"] for each in results} == {4}


@pytest.mark.long
def test_owned_state_that_changed_in_its_capture_step_is_not_trusted(plan: Plan):
    """Nobody has another copy to compare it with; whether it changed before or after, nobody knows."""
    results = run_ranks(train, RANKS, replace(plan, kind="fsdp"), timeout=120)
    assert {(manifestation, step) for manifestation, step in results[0].incidents} == {("sdc", 6)}
    assert set(results[0].named) == {(1,)}
    assert {(each.status["verified"], each.certified) for each in results} == {(4, 4)}
    for each in gone_on(replace(plan, kind="fsdp")):
        assert each.resumed is not None
        assert (each.resumed.step, each.resumed.role) == (4, TrustLevel.VERIFIED)
