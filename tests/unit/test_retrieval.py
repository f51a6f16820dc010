"""Algorithm 3's choice: the right checkpoint, no needless step back, and a clear error without one."""

from __future__ import annotations

import pytest

from tests.unit.test_gate import train
from torchscout.checkpoint.trust.gate import CheckpointGate, transition
from torchscout.checkpoint.trust.gate_state import Checked, Lost, Outcome, Recovered
from torchscout.checkpoint.trust.generation import Generation, TrustLevel
from torchscout.checkpoint.trust.selection import Selection, SweepResult, confirm, select_checkpoint
from torchscout.decision.records.record import Failure

CATALOG = train(CheckpointGate(recipes=2), "hhhhh")
"""Latest 5, candidate 4, verified 2."""
YOUNG = train(CheckpointGate(recipes=2), "hhh")
"""Latest 3, candidate 2, nothing verified."""
DENSE = train(CheckpointGate(), "hhh")
NEEDS_SWEEP = [Failure.HANG, Failure.OTHER]


def chosen(decision: Selection) -> tuple[TrustLevel | None, int | None, bool]:
    return decision.role, decision.generation and decision.generation.step, decision.tentative


@pytest.mark.parametrize("failure", [Failure.SDC, Failure.MACHINES_GONE])
def test_corruption_and_lost_machines_go_back_to_verified_without_a_sweep(failure: Failure):
    decision = select_checkpoint(failure, CATALOG)
    assert chosen(decision) == (TrustLevel.VERIFIED, 2, False)
    assert not decision.is_swept


def test_a_straggler_loses_nothing():
    decision = select_checkpoint(Failure.STRAGGLER, CATALOG)
    assert chosen(decision) == (TrustLevel.LATEST, 5, False)
    assert not decision.is_swept


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (SweepResult.CLEAN, (TrustLevel.LATEST, 5, False)),
        (SweepResult.SDC, (TrustLevel.VERIFIED, 2, False)),
        (SweepResult.COULD_NOT_RUN, (TrustLevel.VERIFIED, 2, False)),
    ],
)
def test_a_sweep_decides_between_latest_and_verified(result: SweepResult, expected: object):
    assert chosen(confirm(CATALOG, result)) == expected


@pytest.mark.parametrize("failure", NEEDS_SWEEP)
def test_blocked_trainers_leave_the_sweep_to_the_next_workers(failure: Failure):
    decision = select_checkpoint(failure, CATALOG)
    assert chosen(decision) == (TrustLevel.LATEST, 5, True)
    assert "the next workers must replay it before they train" in decision.reason


def test_a_tentative_choice_that_proves_corrupt_becomes_the_verified_one():
    """As the next workers live through it."""
    tentative = select_checkpoint(Failure.HANG, CATALOG)
    gate, _ = transition(CATALOG, Recovered(tentative.generation))
    decision = confirm(gate, SweepResult.SDC)
    assert chosen(decision) == (TrustLevel.VERIFIED, 2, False)
    gate, _ = transition(gate, Checked(gate.step + 1, Outcome.SDC))
    gate, _ = transition(gate, Recovered(decision.generation))
    assert gate.latest == gate.verified == Generation(2)


def test_a_dense_hang_needs_no_tentative_load():
    """What is latest is certified already."""
    assert chosen(select_checkpoint(Failure.HANG, DENSE)) == (TrustLevel.VERIFIED, 3, False)


@pytest.mark.parametrize("failure", Failure)
def test_found_corruption_outlives_any_other_failure(failure: Failure):
    poisoned = train(CATALOG, "xhh")
    decision = select_checkpoint(failure, poisoned)
    assert chosen(decision) == (TrustLevel.VERIFIED, 2, False)
    assert decision.reason == "Take the verified checkpoint, step 2: corruption was found at step 6."
    assert chosen(confirm(poisoned, SweepResult.CLEAN)) == (TrustLevel.VERIFIED, 2, False)
    assert not decision.is_swept


@pytest.mark.parametrize("failure", Failure)
def test_without_a_verified_checkpoint_nothing_is_chosen_in_silence(failure: Failure):
    for gate in (CheckpointGate(), train(YOUNG, "x")):
        for decision in (select_checkpoint(failure, gate), confirm(gate, SweepResult.SDC)):
            assert chosen(decision) == (None, None, False)
            assert "Nothing can be recovered" in decision.reason


def test_an_unverified_checkpoint_never_stands_in_for_a_verified_one():
    assert chosen(select_checkpoint(Failure.SDC, YOUNG)) == (None, None, False)
    assert chosen(confirm(YOUNG, SweepResult.SDC)) == (None, None, False)
    assert chosen(confirm(YOUNG, SweepResult.CLEAN)) == (TrustLevel.LATEST, 3, False)


def test_a_lost_latest_leaves_verified():
    gate, _ = transition(CATALOG, Lost(Generation(5)))
    gate, _ = transition(gate, Lost(Generation(4)))
    assert chosen(select_checkpoint(Failure.HANG, gate)) == (TrustLevel.VERIFIED, 2, False)
    assert chosen(select_checkpoint(Failure.STRAGGLER, gate)) == (TrustLevel.VERIFIED, 2, False)
    assert chosen(confirm(gate, SweepResult.CLEAN)) == (TrustLevel.VERIFIED, 2, False)


@pytest.mark.parametrize("gate", [CATALOG, YOUNG, DENSE, CheckpointGate()])
@pytest.mark.parametrize("failure", Failure)
@pytest.mark.parametrize("result", [None, *SweepResult])
def test_every_choice_says_why_and_may_be_loaded(
    gate: CheckpointGate, failure: Failure, result: SweepResult | None
):
    decision = select_checkpoint(failure, gate) if result is None else confirm(gate, result)
    assert decision.reason.endswith(".")
    assert decision.reason[0].isupper()
    if decision.generation:
        transition(gate, Recovered(decision.generation))
