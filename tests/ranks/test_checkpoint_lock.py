"""One job at a time in a folder: real processes that die, stop, fork and race, and jobs without locks."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoint_jobs import Plan, Result
from tests.support.spread_checkpoints import outcomes
from torchscout.checkpoint.folder import owner_of
from torchscout.faults.storage import can_fill_disks, on_a_small_disk

CLAIMANT = """
import os, sys, time
from torchscout.checkpoint.folder import claim, owner_of, put_name
from torchscout.errors import CheckpointError
folder, job, run, then = sys.argv[1:]
if then == "race":
    print("ready", flush=True)
    sys.stdin.readline()
try:
    lock = claim(folder, job, run or None)
except CheckpointError as error:
    print("refused:", error, flush=True)
    sys.exit()
if then == "fork" and not os.fork():
    time.sleep(60)
print("held", lock.problem or "", flush=True)
if then == "race":
    sys.stdin.readline()
    lock.release()
    sys.exit()
time.sleep(60)
"""


def without_locks(*files: Path) -> list[str]:
    """What to start a process with, so that the kernel says that these files' file system has no locks."""
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "inject=flock:error=ENOLCK"]
    if shutil.which("strace") is None or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("this machine does not let tests change what system calls return")
    return [*command, *(f"--trace-path={path}" for path in files)]


@contextmanager
def claimant(
    folder: Path, *, job: str = "ours", run: str = "", then: str = "hold", before: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that tries to hold the folder, and what it says; it is gone afterwards."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", CLAIMANT, str(folder), job, run, then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize("job", ["first", "second"])
def test_a_second_run_is_refused_with_the_owner_of_the_folder(tmp_path: Path, job: str):
    with claimant(tmp_path, job="first") as (process, answer):
        assert answer == "held"
        with claimant(tmp_path, job=job) as (_, outcome):
            owner = f"job 'first', pid {process.pid} on {socket.gethostname()}, since 20"
            assert outcome.startswith(f"refused: {tmp_path} is in use by {owner}")


def test_a_killed_owners_folder_is_free(tmp_path: Path):
    with claimant(tmp_path) as (process, answer):
        assert answer == "held"
        end(process)
        with claimant(tmp_path, job="next") as (_, outcome):
            assert outcome == "held"


def test_a_stopped_owner_is_alive(tmp_path: Path):
    with claimant(tmp_path) as (process, answer):
        assert answer == "held"
        os.kill(process.pid, signal.SIGSTOP)
        with claimant(tmp_path) as (_, outcome):
            assert outcome.startswith("refused: ")


def race(folder: Path, run: str = "") -> list[str]:
    """What eight claimants say that begin at the same moment, and stay until all have spoken."""
    command = [sys.executable, "-c", CLAIMANT, str(folder), "racer", run, "race"]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    assert all(racer.stdout and racer.stdout.readline() == "ready\n" for racer in racers)
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.stdout.readline().strip() for racer in racers if racer.stdout]
    for racer in racers:
        racer.communicate("")
    return answers


def test_of_many_claimants_of_a_dead_owners_folder_exactly_one_wins(tmp_path: Path):
    for attempt in range(2):
        with claimant(tmp_path, job="dead") as (process, answer):
            assert answer == "held", f"attempt {attempt}"
            end(process)
        outcomes = race(tmp_path)
        assert outcomes.count("held") == 1, outcomes
        assert sum(line.startswith("refused: ") for line in outcomes) == 7


def test_processes_of_one_run_hold_it_together_and_the_last_one_frees_it(tmp_path: Path):
    with (
        claimant(tmp_path, run="a") as (first, answer),
        claimant(tmp_path, run="a") as (second, joined),
        claimant(tmp_path, run="a") as (third, also),
    ):
        assert [answer, joined, also] == ["held"] * 3
        for process in (first, second):
            end(process)
            with claimant(tmp_path, run="b") as (_, refused):
                assert refused.startswith("refused: ")
        end(third)
        with claimant(tmp_path, run="b") as (_, outcome):
            assert outcome == "held"


def test_many_processes_of_one_run_that_start_together_all_hold_it(tmp_path: Path):
    """Also where a dead run's name is still written down."""
    with claimant(tmp_path, run="dead") as (process, _):
        end(process)
    assert race(tmp_path, run="a") == ["held"] * 8
    assert owner_of(tmp_path) is None


def test_a_child_that_outlives_its_trainer_does_not_keep_the_folder(tmp_path: Path):
    with claimant(tmp_path, then="fork") as (process, answer):
        assert answer == "held"
        child = only_child(process.pid)
        process.kill()
        process.wait()
        os.kill(child, 0)
        with claimant(tmp_path) as (_, outcome):
            assert outcome == "held"
        os.kill(child, signal.SIGKILL)


def test_without_locks_nobody_is_refused_and_everybody_is_warned(tmp_path: Path):
    strace = without_locks(tmp_path / "lock")
    with claimant(tmp_path, before=strace) as (_, first), claimant(tmp_path, before=strace) as (_, second):
        for answer in (first, second):
            assert answer.startswith(f"held the file system of {tmp_path} has no locks, so it is not noticed")


def job(folder: Path, before: Sequence[str], memory: Path | None) -> tuple[list[Result], str]:
    """A job of two ranks that keeps checkpoints: what each rank tells, and the log."""
    plan = Plan("ddp", 3, interval=1, directory=folder / "checkpoints", memory=memory, run_dir=folder / "run")
    (folder / "plan").write_bytes(pickle.dumps(plan))
    module = [sys.executable, "-m", "tests.support.spread_checkpoints", str(folder / "plan"), str(folder)]
    ran = subprocess.run(
        [*before, *module, "0", "1", "--here"], capture_output=True, text=True, check=False, timeout=120
    )
    found = [each for each in outcomes(folder, 2) if isinstance(each, Result)]
    assert len(found) == 2, (ran.stderr, outcomes(folder, 2))
    for each in found:
        assert each.status["verified"] == 2
        assert each.failures == []
    return found, ran.stderr


def test_a_job_whose_disk_has_no_locks_says_so_once_and_keeps_checkpoints(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    found, log = job(tmp_path, without_locks(folder / "lock"), tmp_path / "memory")
    problem = f"the file system of {folder} has no locks"
    assert log.count(problem) == 1, log
    assert all(any(problem in one for one in each.status["problems"]) for each in found)


def test_a_job_whose_memory_folder_another_user_has_takes_another_one_and_says_so_once(tmp_path: Path):
    if not can_fill_disks():
        pytest.skip("this machine does not let tests mount a file system")
    taken = Path("/dev/shm/torchscout-checkpoints-0")  # in the mounts of its own this process is root
    before = ["sh", "-c", f'mkdir -m 777 {taken} && exec "$@"', "sh"]
    found, log = job(tmp_path, on_a_small_disk(Path("/dev/shm"), 64 << 10, before), None)
    assert {Path(each.status["memory"]).parent for each in found} == {Path(f"{taken}.1")}
    problem = f"because {taken} is not a folder that belongs to this user alone"
    assert log.count(problem) == 1, log
    assert all(any(problem in one for one in each.status["problems"]) for each in found)
