"""The harness itself: results, tracebacks, stacks, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import LiveRanks, RankError, are_fit, run_ranks
from tests.support.small_job import until
from torchscout.testing.local_ranks import die_with_parent
from torchscout.utils.procfs import is_running

ROOT = Path(__file__).parents[2]


def assert_gone(pid: int) -> None:
    until(lambda: not is_running(pid), f"process {pid} has ended", 60)


def summed(rank: int, offset: int) -> tuple[int, int, torch.Tensor, int]:
    """The rank, its process and a child of that, and a sum over all ranks in shared memory."""
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    child = subprocess.Popen(["sleep", "600"]).pid
    return rank, os.getpid(), total.share_memory_(), child


def test_results_come_back_in_rank_order_and_outlive_ranks_and_their_children():
    for rank, (found, pid, total, child) in enumerate(run_ranks(summed, 4, 10)):
        assert (found, total.item()) == (rank, 46)
        assert_gone(pid)
        assert_gone(child)
        assert not list(Path("/dev/shm").glob(f"torch_{pid}_*"))


def failing(rank: int, how: str) -> object:
    match how, rank:
        case "both raise", _:
            raise KeyError(f"boom {rank}")
        case "one raises", 0:
            raise KeyError("only me")
        case "one sleeps", 1:
            the_place_it_sleeps_at()
        case "killed and stopped", _:
            os.kill(os.getpid(), signal.SIGKILL if rank == 0 else signal.SIGSTOP)
        case "no pickle", _:
            return lambda: rank
    dist.barrier()
    return None


def the_place_it_sleeps_at() -> None:
    time.sleep(600)


@pytest.mark.long_cases("one sleeps*", "killed*")
@pytest.mark.parametrize(
    ("how", "timeout", "first", "second"),
    [
        ("both raise", 600, "KeyError: 'boom 0'", "in failing"),
        ("one raises", 600, "KeyError: 'only me'", "in barrier"),
        ("one sleeps", 8, "in barrier", "in the_place_it_sleeps_at"),
        ("killed and stopped", 30, "exit code -9", "its stack is unknown"),
        ("no pickle", 600, "cannot be pickled", "cannot be pickled"),
    ],
)
def test_each_rank_that_fails_or_hangs_is_described(how: str, timeout: float, first: str, second: str):
    with pytest.raises(RankError) as caught:
        run_ranks(failing, 2, how, timeout=timeout)
    of_first, of_second = str(caught.value).split("rank 1:")
    assert first in of_first
    assert second in of_second


def test_a_world_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        run_ranks(failing, 0)


def adding_up(rank: int, questions: Iterator[int], offset: int, ended: Path) -> Iterator[tuple[int, int]]:
    total = offset
    for question in questions:
        if question < 0 and rank == 1:
            raise KeyError(f"never {question}")
        number = torch.tensor([rank + question])
        dist.all_reduce(number)
        total += int(number.item())
        yield total, os.getpid()
    (ended / str(rank)).touch()


def test_live_ranks_answer_one_question_after_another(tmp_path: Path):
    with LiveRanks(adding_up, 2, 100, tmp_path) as ranks:
        first, second = ranks.ask(1), ranks.ask(10)
    assert [total for total, _ in first] == [103, 103]
    assert [total for total, _ in second] == [124, 124]  # they remember
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}, "a body comes to its own end"
    for _, pid in first:
        assert_gone(pid)


def test_a_live_rank_that_fails_is_reported_with_its_traceback(tmp_path: Path):
    with LiveRanks(adding_up, 2, 100, tmp_path) as ranks:
        ranks.ask(1)
        with pytest.raises(RankError, match="never -5") as caught:
            ranks.ask(-5)
    assert "in adding_up" in str(caught.value).split("rank 1:")[0], "where the other one waits"


def making_groups(_rank: int, questions: Iterator[int]) -> Iterator[int]:
    for count in questions:
        for _ in range(count):
            dist.new_group([0, 1])
        yield count


def test_live_ranks_are_fit_until_they_have_many_groups_or_one_is_gone():
    with LiveRanks(making_groups, 2) as ranks:
        ranks.ask(2)
        assert are_fit(ranks)
        ranks.ask(60)
        assert not are_fit(ranks)
    with LiveRanks(making_groups, 2) as ranks:
        (pid, _) = (each.process.pid for each in ranks._ranks)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: not are_fit(ranks), "a rank that is gone is noticed")


def asking_late(started: Path, survived: Path) -> None:
    """A rank that asks to end with its parent only once that is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    started.write_text(str(os.getpid()))
    wait([parent.sentinel])
    die_with_parent()
    survived.touch()


def waiting(rank: int, started: Path) -> None:
    started.write_text(str(os.getpid()))
    time.sleep(600)


_PARENT = """
import multiprocessing, sys, time
from pathlib import Path
from tests.ranks.test_harness import asking_late, waiting
from tests.support.ranks import run_ranks
started, survived = map(Path, sys.argv[2:])
if sys.argv[1] == "late":
    multiprocessing.get_context("forkserver").Process(target=asking_late, args=(started, survived)).start()
    time.sleep(600)
run_ranks(waiting, 1, started)
"""


@pytest.mark.long_cases("early")
@pytest.mark.slow_cases("late")
@pytest.mark.parametrize("asks", ["early", "late"])
def test_a_killed_parent_takes_its_ranks_along(asks: str, tmp_path: Path):
    started, survived = tmp_path / "started", tmp_path / "survived"
    with subprocess.Popen([sys.executable, "-c", _PARENT, asks, started, survived], cwd=ROOT) as parent:
        until(lambda: started.exists() and started.read_text(), "the rank has started", 120)
        parent.kill()
    assert_gone(int(started.read_text()))
    assert not survived.exists()
