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

from tests.support.ranks import LiveRanks, RankError, run_ranks
from tests.support.small_job import until
from torchscout.testing.local_ranks import die_with_parent

ROOT = Path(__file__).parents[2]


def summed(rank: int, offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, total


def test_results_come_back_in_rank_order():
    results = run_ranks(summed, 4, 10)
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    assert all(total.item() == 46 for _, total in results)


def test_one_rank_is_enough():
    assert run_ranks(summed, 1, 5)[0][1].item() == 5


def raising(rank: int) -> None:
    raise KeyError(f"boom {rank}")


def test_every_traceback_is_in_the_message():
    with pytest.raises(RankError, match=r"2 of 2 ranks failed") as caught:
        run_ranks(raising, 2)
    assert "KeyError: 'boom 0'" in str(caught.value)
    assert "KeyError: 'boom 1'" in str(caught.value)
    assert "in raising" in str(caught.value)


def sleeping_in_rank_one(rank: int) -> None:
    if rank == 1:
        the_place_it_sleeps_at()
    dist.barrier()


def the_place_it_sleeps_at() -> None:
    time.sleep(600)


@pytest.mark.long
def test_a_timeout_shows_where_each_rank_is_stuck():
    with pytest.raises(RankError) as caught:
        run_ranks(sleeping_in_rank_one, 2, timeout=8.0)
    first, second = str(caught.value).split("rank 1:")
    assert "in barrier" in first
    assert "in the_place_it_sleeps_at" in second


def raising_in_rank_zero(rank: int) -> None:
    if rank == 0:
        raise KeyError("only me")
    time.sleep(600)


def test_one_failure_does_not_wait_for_the_timeout():
    with pytest.raises(RankError, match="only me") as caught:
        run_ranks(raising_in_rank_zero, 2, timeout=600.0)
    assert "in raising_in_rank_zero" in str(caught.value).split("rank 1:")[1]


def killed_and_stopped(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL if rank == 0 else signal.SIGSTOP)


@pytest.mark.long
def test_killed_and_stopped_ranks_are_reported_not_waited_for():
    with pytest.raises(RankError) as caught:
        run_ranks(killed_and_stopped, 2, timeout=30.0)
    assert "rank 0: exited without an answer, exit code -9" in str(caught.value)
    assert "rank 1: did not answer in time, and its stack is unknown" in str(caught.value)


def unpicklable(rank: int) -> object:
    return lambda: rank


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(RankError, match="its result cannot be pickled"):
        run_ranks(unpicklable, 1)


def starting_a_child(rank: int) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def test_children_of_a_rank_end_with_it():
    for pid in run_ranks(starting_a_child, 2):
        assert_gone(pid)


def shared_tensor(rank: int) -> tuple[int, torch.Tensor]:
    return os.getpid(), torch.full((1000,), float(rank)).share_memory_()


def test_ranks_and_their_shared_memory_are_gone_and_results_outlive_them():
    for rank, (pid, tensor) in enumerate(run_ranks(shared_tensor, 4)):
        assert_gone(pid)
        assert not list(Path("/dev/shm").glob(f"torch_{pid}_*"))
        assert tensor.eq(rank).all()


def assert_gone(pid: int) -> None:
    until(lambda: has_ended(pid), f"process {pid} has ended", 10)


def has_ended(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


@pytest.mark.long
def test_a_killed_parent_takes_its_ranks_along(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys\n"
        "from torchscout.testing.local_ranks import run_ranks\n"
        "from tests.ranks.test_harness import writing_its_pid\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(writing_its_pid, 1, sys.argv[1])\n"
    )
    pid_file = tmp_path / "pid"
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, script, pid_file], env={**os.environ, "PYTHONPATH": str(root)})
    until(lambda: pid_file.exists() and pid_file.read_text(), "the rank has started", 60)
    parent.kill()
    parent.wait()
    assert_gone(int(pid_file.read_text()))


def writing_its_pid(rank: int, path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def test_a_world_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        run_ranks(shared_tensor, 0)


def adding_up(rank: int, questions: Iterator[int], offset: int, ended: Path) -> Iterator[tuple[int, int]]:
    total = offset
    for question in questions:
        if question < 0 and rank == 1:
            raise KeyError(f"never {question}")
        total += int(summed(rank, question)[1].item())
        yield total, os.getpid()
    (ended / str(rank)).touch()


def test_live_ranks_answer_one_question_after_another(tmp_path: Path):
    with LiveRanks(adding_up, 2, 100, tmp_path) as ranks:
        first, second = ranks.ask(1), ranks.ask(10)
    assert [total for total, _ in first] == [103, 103]
    assert [total for total, _ in second] == [124, 124]  # they remember
    assert [pid for _, pid in first] == [pid for _, pid in second]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}, "a body comes to its own end"
    for _, pid in first:
        assert_gone(pid)


def test_a_live_rank_that_fails_is_reported_with_its_traceback(tmp_path: Path):
    with LiveRanks(adding_up, 2, 100, tmp_path) as ranks:
        ranks.ask(1)
        with pytest.raises(RankError, match="never -5") as caught:
            ranks.ask(-5)
    assert "in summed" in str(caught.value).split("rank 1:")[0], "where the other one waits"


def asking_late(started: Path, survived: Path) -> None:
    """A rank that asks to end with its parent only once that is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    started.write_text(str(os.getpid()))
    wait([parent.sentinel])
    die_with_parent()
    survived.touch()


_KILLED_AT_START = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from tests.ranks.test_harness import asking_late
started, survived = map(Path, sys.argv[1:])
multiprocessing.get_context("forkserver").Process(target=asking_late, args=(started, survived)).start()
while not started.exists() or not started.read_text():
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_rank_whose_parent_was_killed_before_it_asked_ends_too(tmp_path: Path):
    started, survived = tmp_path / "started", tmp_path / "survived"
    done = subprocess.run(
        [sys.executable, "-c", _KILLED_AT_START, started, survived], cwd=ROOT, check=False, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    rank, deadline = Path(f"/proc/{started.read_text()}"), time.monotonic() + 60
    while rank.exists() and b") Z " not in (rank / "stat").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline, "it is gone"
    assert not survived.exists()
