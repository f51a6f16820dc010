"""NCCL ranks that end, or that communicate something else, after which NCCL hangs or reads memory it must
not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.hangs import incidents, wait_for_incident
from tests.support.nccl_hangs import CULPRIT, Hang, has_fired, train
from tests.support.ranks import RankError, run_ranks
from torchscout.decision.types import Incident

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3)]
RANKS = 3
WITHOUT_ABORT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def broken(run_dir: Path, hang: Hang, environment: dict[str, str], *, only: bool = True) -> Incident:
    """The incident of a job that may or may not survive."""
    with suppress(RankError):
        run_ranks(
            train, RANKS, run_dir, hang, timeout=45 + hang.stall, backend="nccl", environment=environment
        )
    assert has_fired(run_dir)
    wait_for_incident(run_dir)
    incident, *others = incidents(run_dir)
    assert not (only and others), [each.sentence for each in (incident, *others)]
    return incident


MISMATCHES = {
    "another_size": "issued all_reduce float32[4096] sum",
    "another_operation": "issued all_gather",
    "left_out": "left one out",
    "too_many": "issued",
    "another_order": "wait for each other",
}


@pytest.mark.parametrize("fault", MISMATCHES)
def test_a_rank_that_communicates_something_else_is_named(fault: str, tmp_path: Path, alone: dict[str, str]):
    # The test then aborts the communicators, or NCCL has: what the ranks do after that is not of interest.
    incident = broken(tmp_path / "run", Hang(fault, recovers=False), alone, only=False)
    assert incident.ranks == (CULPRIT,), incident.sentence
    assert MISMATCHES[fault] in incident.sentence


def test_a_send_without_its_receive_names_the_two(tmp_path: Path, alone: dict[str, str]):
    incident = broken(tmp_path / "run", Hang("no_receive", recovers=False), alone)
    assert incident.ranks == (0, CULPRIT), incident.sentence
    assert "0 -> 2" in incident.sentence


@pytest.mark.parametrize("fault", ["killed", "raises"])
def test_a_trainer_that_ends_is_named(fault: str, tmp_path: Path, alone: dict[str, str]):
    incident = broken(tmp_path / "run", Hang(fault, recovers=False), alone)
    assert incident.ranks == (CULPRIT,), incident.sentence


WATCHDOGS = {
    # It ends those that wait, within the time that is granted to the first step.
    "before the verdict": (Hang("late_first", timeout=6.0), {}),
    "after the verdict": (Hang("late_forward", timeout=5.0), {}),
    "without abort": (Hang("late_forward", timeout=5.0), WITHOUT_ABORT),
    "thirty seconds": (Hang("late_forward", timeout=30.0, stall=45.0), {}),
    "thirty seconds, without abort": (Hang("late_forward", timeout=30.0, stall=45.0), WITHOUT_ABORT),
    "ten minutes, the default": (Hang("late_forward", timeout=600.0, stall=630.0), {}),
}
LONG = [pytest.param(case, marks=pytest.mark.slow) if "minutes" in case else case for case in WATCHDOGS]


@pytest.mark.parametrize("case", LONG)
def test_actions_of_the_nccl_watchdog_are_not_blamed_on_victims(
    case: str, tmp_path: Path, alone: dict[str, str]
):
    hang, environment = WATCHDOGS[case]
    broken(tmp_path / "run", hang, alone | environment, only=False)
    # It may be reported once when it hangs, and again when its victims have ended.
    found = incidents(tmp_path / "run")
    assert {each.ranks for each in found} == {(CULPRIT,)}, [each.sentence for each in found]
