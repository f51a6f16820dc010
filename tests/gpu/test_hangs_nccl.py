"""Hangs of real NCCL ranks: the faulty rank is named, its victims are not, and a healthy job is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hangs import incidents, resolutions
from tests.support.nccl_hangs import (
    CULPRIT,
    STEPS,
    STEPS_TO_COME_BACK,
    Hang,
    Seen,
    failing_in_a_check,
    has_fired,
    late_in_a_check,
    train,
)
from tests.support.ranks import run_ranks
from torchscout.decision.types import Incident, Scope

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3)]
RANKS = 3
STOPS = ["nothing", "item", "synchronize", "stream", "event", "copy", "barrier"]


def ran(run_dir: Path, hang: Hang) -> list[Seen]:
    seen = run_ranks(train, RANKS, run_dir, hang, timeout=100, backend="nccl")
    assert has_fired(run_dir) is (hang.fault != "none")
    assert [each.status["failures"] for each in seen] == [[], [], []]
    return seen


def only_incident(run_dir: Path) -> Incident:
    (incident,) = incidents(run_dir)
    return incident


@pytest.mark.parametrize("stop", STOPS)
def test_a_healthy_job_is_silent(stop: str, tmp_path: Path):
    seen = ran(tmp_path, Hang(stop=stop))
    assert [each.steps for each in seen] == [STEPS] * RANKS
    assert incidents(tmp_path) == []


@pytest.mark.parametrize("hang", [Hang(compiled=True), Hang(captured=True)], ids=["compiled", "captured"])
def test_a_healthy_compiled_or_captured_job_is_silent(hang: Hang, tmp_path: Path):
    assert [each.steps for each in ran(tmp_path, hang)] == [STEPS] * RANKS
    assert incidents(tmp_path) == []


RECOVERING = {
    **{f"late_forward-{stop}": Hang("late_forward", stop) for stop in STOPS},
    "late_backward": Hang("late_backward"),
    "late_input": Hang("late_input"),
    "late_code": Hang("late_code"),
    "stopped": Hang("stopped"),
    "late_compiled": Hang("late_forward", compiled=True),
    **{f"spin-{stop}": Hang("spin", stop) for stop in STOPS},
    "spin_backward": Hang("spin_backward"),
    "spin_aside": Hang("spin_aside"),
    "slow_device": Hang("slow"),
}


@pytest.mark.parametrize("case", RECOVERING)
def test_a_rank_that_holds_up_the_others_for_a_while_is_named(case: str, tmp_path: Path):
    seen = ran(tmp_path, RECOVERING[case])
    assert [each.steps for each in seen] == [STEPS] * RANKS
    incident = only_incident(tmp_path)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (CULPRIT,)), incident.sentence
    fault = RECOVERING[case].fault
    if fault.startswith("spin"):
        assert "its device has not reached it" in incident.sentence
    if fault == "late_input":
        assert "in input" in incident.sentence
    (resolved,) = resolutions(tmp_path)
    assert resolved.ranks == (CULPRIT,)


def test_a_late_rank_whose_peers_shut_down_is_named(tmp_path: Path):
    """They wait in ``destroy_process_group()``."""
    seen = ran(tmp_path, Hang("late_last", stop="destroy"))
    assert [each.steps for each in seen] == [STEPS] * RANKS
    incident = only_incident(tmp_path)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (CULPRIT,)), incident.sentence


def test_a_healthy_job_that_shuts_down_is_silent(tmp_path: Path):
    assert [each.steps for each in ran(tmp_path, Hang(stop="destroy"))] == [STEPS] * RANKS
    assert incidents(tmp_path) == []


def test_a_late_rank_whose_peers_are_inside_a_cuda_graph_is_named(tmp_path: Path):
    ran(tmp_path, Hang("late_forward", captured=True))
    incident = only_incident(tmp_path)
    assert incident.ranks == (CULPRIT,), incident.sentence
    assert "Communication inside CUDA graphs is not observed" in incident.sentence


def test_a_device_that_is_stuck_beside_cuda_graphs_names_nobody(tmp_path: Path):
    ran(tmp_path, Hang("spin", captured=True))
    incident = only_incident(tmp_path)
    assert incident.scope is Scope.JOB, incident.sentence
    assert "CUDA graphs is not observed, so that nobody can be named" in incident.sentence


def test_a_rank_that_is_late_inside_a_check_does_not_end_training(tmp_path: Path):
    seen = run_ranks(late_in_a_check, RANKS, tmp_path, timeout=100, backend="nccl")
    assert has_fired(tmp_path)
    assert [each.steps for each in seen] == [STEPS_TO_COME_BACK] * RANKS
    # It is late in the check, and once its peers have left that, in training.
    assert {each.ranks for each in incidents(tmp_path)} == {(CULPRIT,)}
    # SCOUT's communicators were aborted, and made again some steps later.
    assert [len(each.status["failures"]) for each in seen] == [1] * RANKS
    assert [each.status["replay"]["certified"] for each in seen] == [STEPS_TO_COME_BACK] * RANKS
    assert [each.status["replay"].get("off") for each in seen] == [None] * RANKS


def test_a_rank_that_fails_inside_a_check_does_not_block_the_devices_of_other_ranks(tmp_path: Path):
    seen = run_ranks(failing_in_a_check, RANKS, tmp_path, timeout=100, backend="nccl")
    assert has_fired(tmp_path)
    assert [each.steps for each in seen] == [STEPS] * RANKS
    stopped = [each.status["replay"]["off"] for each in seen]
    assert ["MemoryError" in each for each in stopped] == [rank == CULPRIT for rank in range(RANKS)]
