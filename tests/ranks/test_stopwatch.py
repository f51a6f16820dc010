"""What a pass computes, timed apart from what it communicates, with real collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from torchscout.replay.recipe import Observation
from torchscout.replay.timing import timed

CPU = torch.device("cpu")


def passing(rank: int, *, is_async: bool) -> Observation:
    """Rank 1 computes for a second; the others wait for it in the collective."""
    seen = Observation()
    with timed(CPU, seen, work="time/module", communication="time/{}@"):
        if rank == 1:
            time.sleep(1)
        work = dist.all_reduce(torch.ones(8), async_op=is_async)
        time.sleep(0.05)
        if work is not None:
            work.wait()
    seen.read()
    return seen


@pytest.mark.parametrize("is_async", [False, True])
def test_a_waiting_rank_is_not_the_slow_one(is_async: bool):
    found = run_ranks(passing_kind, 3, is_async)
    own = [each.times["time/module"] for each in found]
    assert own[1] > 990
    assert max(own[0], own[2]) < 500
    laps = [each.laps["time/all_reduce@", (0, 1, 2)] for each in found]
    assert [[elements for elements, _ in each] for each in laps] == [[8], [8], [8]]
    assert min(laps[0][0][1], laps[2][0][1]) > 200  # a busy machine may delay those that wait


def passing_kind(rank: int, is_async: bool) -> Observation:
    return passing(rank, is_async=is_async)


def sending(rank: int) -> Observation:
    """A ring: everybody sends before anybody receives."""
    seen = Observation()
    with timed(CPU, seen, work="time/module", communication="time/{}@"):
        operations = [
            dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % 3),
            dist.P2POp(dist.irecv, torch.ones(4), (rank - 1) % 3),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    seen.read()
    return seen


def passing_on(rank: int) -> Observation:
    """One sends, the other receives: both are done at once, and still nobody knows who waited for whom."""
    seen = Observation()
    with timed(CPU, seen, work="time/module", communication="time/{}@"):
        dist.send(torch.ones(4), 1) if rank == 0 else dist.recv(torch.ones(4), 0)
    seen.read()
    return seen


@pytest.mark.parametrize(("body", "ranks"), [(sending, 3), (passing_on, 2)])
def test_a_pass_that_sends_and_receives_is_not_timed(body: Callable[[int], Observation], ranks: int):
    for seen in run_ranks(body, ranks):
        assert seen.times == {}
        assert seen.laps == {}


def failing(rank: int) -> tuple[dict, int]:
    seen = Observation()
    try:
        with timed(CPU, seen, work="time/module", communication="time/{}@"):
            raise ValueError(rank)
    except ValueError:
        dist.barrier()
        seen.read()
        return seen.times, len(seen.laps)
    raise AssertionError("nobody failed")


def test_a_failing_pass_reports_no_times_and_removes_its_listener():
    assert run_ranks(failing, 2) == [({}, 0)] * 2


def beside(rank: int) -> tuple[int, float]:
    """Another thread, on a group of its own, communicates while this one is being timed."""
    aside = dist.new_group()
    seen = Observation()

    def other() -> None:
        dist.all_reduce(torch.ones(1), group=aside)

    with timed(CPU, seen, work="time/module", communication="time/{}@"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    seen.read()
    return len(seen.laps), seen.times["time/module"]


@pytest.mark.long
def test_communication_of_other_threads_is_not_timed():
    assert [laps for laps, _ in run_ranks(beside, 2)] == [0, 0]


def inverted(rank: int) -> tuple[bool, list[str]]:
    """Two groups of the same ranks, used in opposite order: right as long as nobody waits in between."""
    first, second = dist.new_group(), dist.new_group()
    seen = Observation()
    groups = [first, second] if rank == 0 else [second, first]
    with timed(CPU, seen, work="time/module", communication="time/{}@"):
        for work in [dist.all_reduce(torch.ones(1), group=each, async_op=True) for each in groups]:
            work.wait()
    seen.read()
    return "time/module" in seen.times, [surface for surface, _ in seen.laps]


def test_a_program_that_must_not_wait_where_it_issues_goes_on():
    """Whoever gives up waiting first is not timed; the other may find its collective done thereby."""
    assert not all(is_timed for is_timed, _ in run_ranks(inverted, 2, timeout=60))
