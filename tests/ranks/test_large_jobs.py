"""Checks of a job that is too large for one group of ranks. Here groups have two members, so that five ranks
make a tree of three levels."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.hangs import incidents
from tests.support.ranks import run_ranks
from tests.support.replay_jobs import Job, bytes_of
from torchscout import communicators
from torchscout.attach import enable_resiliency
from torchscout.c3 import tree
from torchscout.c3.tree import TreeChannel, groups_of
from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import Pending, listen
from torchscout.config import ReplayConfig
from torchscout.decision.baseline import Slowness, Stragglers
from torchscout.decision.timings import Timings
from torchscout.errors import ChannelError
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.utils.reentrancy import in_own_work

RANKS, STEPS = 5, 9
CONFIG = ReplayConfig(interval=1, timeout_seconds=60.0)
WRONG, FAULTY_STEP = 3, 3
EXCHANGES = 5
"""Of one check: descriptions, readiness, inputs, evidence, times and votes."""


class Counted:
    """SCOUT's own collectives, and the largest group that any of them used."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.largest = 0

    def before(self, call: Call) -> None:
        if call.group.is_scouts:
            self.operations[call.operation] += 1
            self.largest = max(self.largest, len(call.group.members or ()))

    def issued(self, call: Call, token: object, pending: Pending | None) -> None:
        """Counted already."""


class Found(NamedTuple):
    weights: bytes
    failures: list[str]
    incidents: list[tuple[str, str, tuple[int, ...]]]
    certified: int | None
    operations: Counter[str]
    largest: int


def narrow() -> None:
    tree.FAN_OUT = communicators.FAN_OUT = 2


def trained(
    rank: int,
    run_dir: Path | None,
    faults: FaultPlan,
    break_in: int = 0,
    wrong: bool = False,
    looks_late: bool = False,
) -> Found:
    """``break_in`` is the exchange of the faulty step in which rank 2 loses its connections; 0 for none. If
    rank 0 ``looks_late`` for slow ranks, it has found nothing yet when its check ends."""
    narrow()
    if looks_late:
        before_looking(partial(time.sleep, 0.5))
    job, counted = Job(rank), Counted()
    if wrong:
        job.net.stack[0].down.register_forward_hook(
            lambda _, __, output: (
                output + 1 if in_own_work() and (rank, job.step) == (WRONG, FAULTY_STEP) else None
            )
        )
    if rank == 2 and break_in:
        _break(job, break_in)
    if run_dir is None:
        job.train(STEPS)
        return Found(bytes_of(job.net.parameters()), [], [], None, counted.operations, 0)
    with (
        Injector(faults, rank, job.net, job.optimizer),
        enable_resiliency(job.model, job.optimizer, replay=CONFIG, observer=None, run_dir=run_dir) as session,
    ):
        job.train(2)
        with listen(counted):
            job.train(STEPS - 2)
        found = [(each.manifestation.value, each.scope.value, each.ranks) for each in session.incidents]
        return Found(
            bytes_of(job.net.parameters()),
            list(session.failures),
            found,
            session.certified_step,
            counted.operations,
            counted.largest,
        )


def before_looking(wait: Callable[[], object]) -> None:
    """Let rank 0 wait in its thread before it looks for slow ranks."""
    observe = Stragglers.observe

    def later(self: Stragglers, timings: Timings) -> Slowness:
        wait()
        return observe(self, timings)

    Stragglers.observe = later  # type: ignore[method-assign]


def _break(job: Job, exchange: int) -> None:
    left, original = exchange, TreeChannel._up

    def up(channel: TreeChannel, own: Any, merge: Any) -> Any:
        nonlocal left
        left -= job.step == FAULTY_STEP
        if not left:
            left = -1
            raise ChannelError("the connection broke")
        return original(channel, own, merge)

    TreeChannel._up = up  # type: ignore[method-assign]


def test_a_healthy_job_uses_small_groups_and_few_exchanges(tmp_path: Path):
    found = run_ranks(trained, RANKS, tmp_path, FaultPlan(), timeout=120)
    untouched = run_ranks(trained, RANKS, None, FaultPlan(), timeout=120)
    for rank, each in enumerate(found):
        assert each.weights == untouched[rank].weights
        assert (each.failures, each.incidents, each.certified, each.largest) == ([], [], STEPS, 2)
        # Up and down again, on each level that the rank belongs to, and the first exchange of sizes.
        levels = len(groups_of(rank, RANKS, 2))
        assert sum(each.operations.values()) <= (STEPS - 2) * EXCHANGES * 3 * levels, each.operations


def slow_from(step: int) -> FaultPlan:
    faults = FaultPlan()
    for layer in (0, 1):
        faults = faults.delay(
            rank=WRONG, at=f"stack.{layer}/forward", step=range(step, STEPS + 1), seconds=0.3, calls=None
        )
    return faults


@pytest.mark.long
def test_rank_0_finds_a_slow_rank_for_all(tmp_path: Path):
    found = run_ranks(trained, RANKS, tmp_path, slow_from(3), timeout=120)
    assert [each.incidents for each in found] == [[("straggler", "rank", (WRONG,))]] * RANKS
    assert [each.failures for each in found] == [[]] * RANKS


def trained_while_rank_0_looks(rank: int, run_dir: Path) -> tuple[list[bool], list[str]]:
    """Rank 0 looks for slow ranks only once the next step has begun."""
    narrow()
    job, began, in_time = Job(rank), threading.Event(), list[bool]()
    before_looking(lambda: in_time.append(began.wait(60)))
    with enable_resiliency(
        job.model, job.optimizer, replay=CONFIG, observer=None, run_dir=run_dir
    ) as session:
        for _ in range(3):
            began.clear()
            job.train(1)
            began.set()
    return in_time, list(session.failures)


def test_training_does_not_wait_while_rank_0_looks_for_slow_ranks(tmp_path: Path):
    found = run_ranks(trained_while_rank_0_looks, RANKS, tmp_path, timeout=120)
    assert found == [([True] * 3, []), *[([], [])] * (RANKS - 1)]


def test_a_slow_rank_that_the_last_check_finds_is_recorded(tmp_path: Path):
    found = run_ranks(trained, RANKS, tmp_path, slow_from(STEPS - 1), 0, False, True, timeout=120)
    assert [each.failures for each in found] == [[]] * RANKS
    (incident,) = incidents(tmp_path)
    assert (incident.scope.value, incident.ranks, incident.step) == ("rank", (WRONG,), STEPS)


def test_a_wrong_result_names_its_rank(tmp_path: Path):
    found = run_ranks(trained, RANKS, tmp_path, FaultPlan(), 0, True, timeout=120)
    assert [each.incidents for each in found] == [[("sdc", "rank", (WRONG,))]] * RANKS
    assert [each.failures for each in found] == [[]] * RANKS


@pytest.mark.parametrize("exchange", [1, 2, 3, 4])
def test_a_rank_that_fails_between_vote_and_exchange_divides_no_ranks(exchange: int, tmp_path: Path):
    """All ranks leave the check, train on, and come back together."""
    found = run_ranks(trained, RANKS, tmp_path, FaultPlan(), exchange, timeout=120)
    untouched = run_ranks(trained, RANKS, None, FaultPlan(), timeout=120)
    assert [each.weights for each in found] == [each.weights for each in untouched]
    assert [len(each.failures) for each in found] == [1] * RANKS
    assert [each.certified for each in found] == [STEPS] * RANKS, [each.failures for each in found]
    assert [each.incidents for each in found] == [[]] * RANKS
