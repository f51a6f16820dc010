"""Algorithm 3's choice: the right checkpoint, no needless step back, and an open word where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.test_gate import train
from torchscout.checkpoint.gate import CheckpointGate, after
from torchscout.checkpoint.generation import Generation, Role
from torchscout.checkpoint.happening import Checked, Lost, Outcome, Recovered
from torchscout.recovery.retrieval import Decision, Failure, Sweep, confirm, retrieve

CATALOG = train(CheckpointGate(recipes=2), "hhhhh")
"""Latest 5, candidate 4, verified 2."""
YOUNG = train(CheckpointGate(recipes=2), "hhh")
"""Latest 3, candidate 2, nothing verified."""
DENSE = train(CheckpointGate(), "hhh")
NEEDS_SWEEP = [Failure.HANG, Failure.OTHER]


def sweeping(result: Sweep) -> tuple[Callable[[], Sweep], list[Sweep]]:
    calls: list[Sweep] = []

    def sweep() -> Sweep:
        calls.append(result)
        return result

    return sweep, calls


def chosen(decision: Decision) -> tuple[Role | None, int | None, bool]:
    return decision.role, decision.generation and decision.generation.step, decision.tentative


@pytest.mark.parametrize("failure", [Failure.SDC, Failure.MACHINES_GONE])
def test_corruption_and_lost_machines_go_back_to_verified_without_a_sweep(failure: Failure):
    sweep, calls = sweeping(Sweep.CLEAN)
    decision = retrieve(failure, CATALOG, sweep)
    assert chosen(decision) == (Role.VERIFIED, 2, False)
    assert calls == []


def test_a_straggler_loses_nothing():
    sweep, calls = sweeping(Sweep.SDC)
    assert chosen(retrieve(Failure.STRAGGLER, CATALOG, sweep)) == (Role.LATEST, 5, False)
    assert calls == []


@pytest.mark.parametrize("failure", NEEDS_SWEEP)
@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (Sweep.CLEAN, (Role.LATEST, 5, False)),
        (Sweep.SDC, (Role.VERIFIED, 2, False)),
        (Sweep.COULD_NOT_RUN, (Role.VERIFIED, 2, False)),
    ],
)
def test_any_other_failure_asks_the_whole_catalog(failure: Failure, result: Sweep, expected: object):
    sweep, calls = sweeping(result)
    assert chosen(retrieve(failure, CATALOG, sweep)) == expected
    assert len(calls) == 1
    assert chosen(confirm(CATALOG, result)) == expected


@pytest.mark.parametrize("failure", NEEDS_SWEEP)
def test_blocked_trainers_leave_the_sweep_to_the_next_workers(failure: Failure):
    decision = retrieve(failure, CATALOG)
    assert chosen(decision) == (Role.LATEST, 5, True)
    assert "the next workers must before they train" in decision.reason


def test_a_tentative_choice_that_proves_corrupt_becomes_the_verified_one():
    """As the next workers live through it."""
    tentative = retrieve(Failure.HANG, CATALOG)
    gate, _ = after(CATALOG, Recovered(tentative.generation))
    decision = confirm(gate, Sweep.SDC)
    assert chosen(decision) == (Role.VERIFIED, 2, False)
    gate, _ = after(gate, Checked(gate.step + 1, Outcome.SDC))
    gate, _ = after(gate, Recovered(decision.generation))
    assert gate.latest == gate.verified == Generation(2)


def test_a_dense_hang_needs_no_tentative_load():
    """What is latest is certified already."""
    assert chosen(retrieve(Failure.HANG, DENSE)) == (Role.VERIFIED, 3, False)


@pytest.mark.parametrize("failure", Failure)
def test_found_corruption_outlives_any_other_failure(failure: Failure):
    sweep, calls = sweeping(Sweep.CLEAN)
    poisoned = train(CATALOG, "xhh")
    decision = retrieve(failure, poisoned, sweep)
    assert chosen(decision) == (Role.VERIFIED, 2, False)
    assert decision.reason == "Take the verified checkpoint, step 2: corruption was found at step 6."
    assert chosen(confirm(poisoned, Sweep.CLEAN)) == (Role.VERIFIED, 2, False)
    assert calls == []


@pytest.mark.parametrize("failure", Failure)
@pytest.mark.parametrize("sweep", [None, sweeping(Sweep.SDC)[0]])
def test_without_a_verified_checkpoint_nothing_is_chosen_in_silence(
    failure: Failure, sweep: Callable[[], Sweep] | None
):
    for gate in (CheckpointGate(), train(YOUNG, "x")):
        decision = retrieve(failure, gate, sweep)
        assert chosen(decision) == (None, None, False)
        assert "Nothing can be recovered" in decision.reason


def test_an_unverified_checkpoint_never_stands_in_for_a_verified_one():
    assert chosen(retrieve(Failure.SDC, YOUNG)) == (None, None, False)
    assert chosen(retrieve(Failure.HANG, YOUNG, sweeping(Sweep.SDC)[0])) == (None, None, False)
    assert chosen(retrieve(Failure.HANG, YOUNG, sweeping(Sweep.CLEAN)[0])) == (Role.LATEST, 3, False)


def test_a_lost_latest_leaves_verified():
    gate, _ = after(CATALOG, Lost(Generation(5)))
    gate, _ = after(gate, Lost(Generation(4)))
    assert chosen(retrieve(Failure.HANG, gate)) == (Role.VERIFIED, 2, False)
    assert chosen(retrieve(Failure.STRAGGLER, gate)) == (Role.VERIFIED, 2, False)
    assert chosen(confirm(gate, Sweep.CLEAN)) == (Role.VERIFIED, 2, False)


@pytest.mark.parametrize("gate", [CATALOG, YOUNG, DENSE, CheckpointGate()])
@pytest.mark.parametrize("failure", Failure)
@pytest.mark.parametrize("result", [None, *Sweep])
def test_every_choice_says_why_and_may_be_loaded(
    gate: CheckpointGate, failure: Failure, result: Sweep | None
):
    decision = retrieve(failure, gate, result and (lambda: result))
    assert decision.reason.endswith(".")
    assert decision.reason[0].isupper()
    if decision.generation:
        after(gate, Recovered(decision.generation))
