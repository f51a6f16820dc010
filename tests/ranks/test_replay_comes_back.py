"""A failure of replay is not for ever: checks come back on all ranks at the same step, or stay off on all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.hangs import incidents
from tests.support.ranks import run_ranks
from tests.support.replay_jobs import Job, bytes_of, records, steps_of
from torchscout.checkpoint.gate import TrustLevel
from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import Pending, listen
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.decision.types import EvidenceRecord, Manifestation
from torchscout.errors import ChannelError
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.replay import replayer
from torchscout.session.replay.recovery import ATTEMPTS
from torchscout.session.replay.time_comparison import Compared, TimeComparison
from torchscout.utils.reentrancy import in_own_work

RANKS, LATE_RANK, FAULTY_STEP, STEPS = 3, 1, 3, 14
TIMEOUT = 1.5
CONFIG = ReplayConfig(interval=1, timeout_seconds=TIMEOUT)


class Late:
    """Delays one rank in a check before one of SCOUT's operations, for longer than its peers wait."""

    def __init__(self, job: Job, operation: str, is_turn: Callable[[int], bool]) -> None:
        self._job, self._operation, self._is_turn, self.steps = job, operation, is_turn, list[int]()

    def before(self, call: Call) -> None:
        step = self._job.step
        if self._job.rank != LATE_RANK or not self._is_turn(step) or step in self.steps:
            return
        if call.group.is_scouts and call.operation == self._operation:
            self.steps.append(step)
            time.sleep(2 * TIMEOUT)

    def issued(self, call: Call, token: object, pending: Pending | None) -> None:
        """Nothing is done after a collective."""


@dataclass
class Seen:
    late: list[int]
    """The steps at which this rank was late in a check."""
    states: list[dict[str, Any]]
    """The status of replay after each step."""
    certified: list[int | None]
    failures: list[str]
    records: list[EvidenceRecord]
    weights: bytes


def train(
    rank: int,
    run_dir: Path,
    operation: str,
    turns: tuple[int, ...],
    steps: int = STEPS,
    faults: FaultPlan | None = None,
) -> Seen:
    job = Job(rank)
    late = Late(job, operation, lambda step: step in turns)
    states, certified = [], []
    with (
        Injector(faults or FaultPlan(), rank, job.net, job.optimizer),
        job.attach(run_dir, CONFIG) as session,
        listen(late),
    ):
        for _ in range(steps):
            job.train()
            states.append(session.status()["replay"])
            certified.append(session.certified_step)
        weights = bytes_of(job.net.parameters())
    return Seen(late.steps, states, certified, session.failures, records(run_dir, rank), weights)


def alone(rank: int, steps: int) -> bytes:
    job = Job(rank)
    job.train(steps)
    return bytes_of(job.net.parameters())


def off_steps(seen: Seen) -> list[int]:
    return [step for step, state in enumerate(seen.states, 1) if "off" in state]


@pytest.mark.parametrize(
    "operation",
    [
        "broadcast",
        pytest.param("all_reduce", marks=pytest.mark.slow),
        pytest.param("all_gather", marks=pytest.mark.slow),
    ],
)
def test_checks_come_back_on_all_ranks_after_one_was_late_in_a_check(tmp_path: Path, operation: str):
    results = run_ranks(train, RANKS, tmp_path, operation, (FAULTY_STEP,), timeout=90)
    assert [each.late for each in results] == [[], [FAULTY_STEP], []]
    last_off = {max(off_steps(each)) for each in results}
    assert len(last_off) == 1, "all ranks come back at the same step"
    (back,) = last_off
    assert back < STEPS - 3
    for each in results:
        assert len(each.failures) == 1
        assert "ChannelError" in each.failures[0]
        state = each.states[back - 1]
        assert state["off"].startswith("checks are off since step 3, next attempt at step "), state
        checked = steps_of(each.records, "state/parameters")
        assert checked == sorted({*checked} - {*range(FAULTY_STEP + 1, back + 2)}), "no check in between"
        assert [step for step in range(back + 2, STEPS + 1) if step not in checked] == []
        assert each.certified[FAULTY_STEP - 2] == FAULTY_STEP - 1
        assert {*each.certified[FAULTY_STEP - 1 : back]} <= {FAULTY_STEP - 1, FAULTY_STEP}
        assert each.certified[-1] == STEPS
    assert incidents(tmp_path) == []
    assert run_ranks(alone, RANKS, STEPS, timeout=60) == [each.weights for each in results]


def test_a_bit_that_flips_after_checks_came_back_is_named(tmp_path: Path):
    faults = FaultPlan().set_value(rank=2, at="stack.0.up/weight", step=STEPS - 2, value=3.0)
    results = run_ranks(train, RANKS, tmp_path, "broadcast", (FAULTY_STEP,), STEPS, faults, timeout=90)
    assert [each.late for each in results] == [[], [FAULTY_STEP], []]
    (incident,) = incidents(tmp_path)
    assert (incident.manifestation, incident.ranks) == (Manifestation.SDC, (2,))
    assert incident.step == STEPS - 2
    assert {each.certified[-1] for each in results} == {STEPS - 3}


def test_a_job_whose_checks_do_not_fail_never_reconnects(tmp_path: Path):
    for each in run_ranks(train, RANKS, tmp_path, "broadcast", (), timeout=90):
        assert (each.failures, off_steps(each), each.certified[-1]) == ([], [], STEPS)
    assert not (tmp_path / "replay.json").exists()


def failing_job(rank: int, run_dir: Path) -> tuple[list[str], list[int], int | None]:
    """Rank 1 runs out of memory in a check. The others would wait for it for a minute."""
    job, receive = Job(rank), replayer.receive_together
    has_failed = False

    def receive_or_fail(*args: Any) -> None:
        nonlocal has_failed
        if rank == LATE_RANK and job.step == FAULTY_STEP and not has_failed:
            has_failed = True
            raise MemoryError("no memory for the inputs of a check")
        receive(*args)

    replayer.receive_together = receive_or_fail
    off = []
    with job.attach(run_dir, ReplayConfig(interval=1, timeout_seconds=60.0)) as session:
        for step in range(1, STEPS + 1):
            job.train()
            off += [step] if "off" in session.status()["replay"] else []
        return session.failures, off, session.certified_step


def test_a_rank_that_fails_by_itself_keeps_no_other_rank_waiting(tmp_path: Path):
    results = run_ranks(failing_job, RANKS, tmp_path, timeout=45)
    for rank, (failures, off, certified) in enumerate(results):
        assert len(failures) == 1
        assert failures[0].startswith("MemoryError" if rank == LATE_RANK else "ChannelError")
        assert (off, certified) == ([*range(FAULTY_STEP, FAULTY_STEP + 4)], STEPS)


def wrong_job(rank: int, run_dir: Path) -> tuple[list[int], int | None]:
    """Rank 2 computes wrong numbers in one check, and rank 1 fails when all have compared them."""
    job, vote, has_failed = Job(rank), TimeComparison.exchange, False

    def fail_before_the_vote(*args: Any, **options: Any) -> Compared:
        nonlocal has_failed
        if rank == LATE_RANK and job.step == FAULTY_STEP and not has_failed:
            has_failed = True
            raise MemoryError("no memory for a vote")
        return vote(*args, **options)

    TimeComparison.exchange = fail_before_the_vote  # type: ignore[method-assign]
    job.net.stack[0].down.register_forward_hook(
        lambda _, __, output: output + 1 if in_own_work() and (rank, job.step) == (2, FAULTY_STEP) else None
    )
    off = []
    with job.attach(run_dir, ReplayConfig(interval=1, timeout_seconds=60.0)) as session:
        for step in range(1, STEPS + 1):
            job.train()
            off += [step] if "off" in session.status()["replay"] else []
        return off, session.certified_step


def test_corruption_that_a_failed_check_has_found_counts_when_checks_are_back(tmp_path: Path):
    results = run_ranks(wrong_job, RANKS, tmp_path, timeout=60)
    # The fault has left no trace in the state, and later checks find nothing.
    assert results == [([*range(FAULTY_STEP, FAULTY_STEP + 4)], FAULTY_STEP - 1)] * RANKS
    (incident,) = incidents(tmp_path)
    assert (incident.manifestation, incident.ranks) == (Manifestation.SDC, (2,))
    assert incident.step == FAULTY_STEP


@dataclass
class Kept:
    off: list[int]
    certified: list[int | None]
    verified: set[int | None]
    """The steps that were verified checkpoints at any time."""
    failures: list[str]
    weights: dict[int, bytes]
    """After each step."""


def keeping_job(rank: int, folder: Path) -> Kept:
    """Rank 1 loses its connections right after a vote that has succeeded on all ranks."""
    os.environ["TORCHSCOUT_MEMORY"] = str(folder / "memory")
    job, vote, has_failed = Job(rank), TimeComparison.exchange, False

    def vote_and_fail(*args: Any, **options: Any) -> Compared:
        nonlocal has_failed
        compared = vote(*args, **options)
        if rank == LATE_RANK and job.step == 4 and not has_failed:
            has_failed = True
            raise ChannelError("the connection broke when all ranks but this one had the result")
        return compared

    TimeComparison.exchange = vote_and_fail  # type: ignore[method-assign]
    config = ReplayConfig(interval=2, timeout_seconds=60.0)
    checkpoint = CheckpointConfig(folder / "checkpoints", timeout_seconds=20.0)
    kept = Kept([], [], set(), [], {})
    with job.attach(folder / "run", config, checkpoint=checkpoint) as session:
        for step in range(1, STEPS + 3):
            job.train()
            kept.weights[step] = bytes_of(job.net.parameters())
            kept.certified.append(session.certified_step)
            status = session.status()
            kept.verified.add(status["checkpoint"]["verified"])
            kept.off += [step] if "off" in status["replay"] else []
        kept.failures = session.failures
    assert has_failed is (rank == LATE_RANK)
    return kept


def resumed_job(rank: int, folder: Path) -> tuple[int, TrustLevel | None, bytes]:
    os.environ["TORCHSCOUT_MEMORY"] = str(folder / "memory")
    job = Job(rank)
    checkpoint = CheckpointConfig(folder / "checkpoints", timeout_seconds=20.0)
    with job.attach(folder / "again", CONFIG, checkpoint=checkpoint) as session:
        resumed = session.resume()
        return resumed.step, resumed.role, bytes_of(job.net.parameters())


def test_checkpoints_are_certified_again_and_nothing_in_between_is(tmp_path: Path):
    results = run_ranks(keeping_job, RANKS, tmp_path, timeout=90)
    # Rank 1 has failed at step 4, and the others notice at their next check.
    assert [min(each.off) for each in results] == [6, 4, 6]
    (back,) = {max(each.off) for each in results}
    for each in results:
        assert len(each.failures) == 1, each.failures
        # Ranks 0 and 2 have captured the state of step 4, rank 1 has not: no rank may rely on it.
        assert each.verified.isdisjoint(range(3, back + 1)), each.verified
        assert {2, STEPS} <= each.verified
        assert each.certified[-1] == STEPS + 2
        assert each.certified[back - 1] in (2, 4)
    assert incidents(tmp_path / "run") == []
    resumed = run_ranks(resumed_job, RANKS, tmp_path, timeout=90)
    for (step, role, weights), kept in zip(resumed, results, strict=True):
        assert (step, role) == (STEPS + 2, TrustLevel.VERIFIED)
        assert weights == kept.weights[step]
    plain = run_ranks(alone, RANKS, STEPS + 2, timeout=60)
    assert plain == [each.weights[STEPS + 2] for each in results]


@pytest.mark.slow
def test_checks_that_fail_every_time_stay_off_with_one_incident(tmp_path: Path):
    steps = 70
    results = run_ranks(train, RANKS, tmp_path, "broadcast", tuple(range(3, steps)), steps, timeout=150)
    assert [len(each.late) for each in results] == [0, 1 + ATTEMPTS, 0]
    (incident,) = incidents(tmp_path)
    assert incident.manifestation is Manifestation.NOT_CHECKED
    (record,) = incident.records
    assert record.status == "not_checked"
    assert "ChannelError" in str(record.reason)
    for each in results:
        assert "stay off" in each.states[-1]["off"]
        assert each.states[-1]["next_attempt"] is None
        assert each.certified[-1] in (2, 3)
    assert run_ranks(alone, RANKS, steps, timeout=60) == [each.weights for each in results]
