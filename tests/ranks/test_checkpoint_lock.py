"""One job at a time in a folder: real processes that die, stop, fork and race."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchscout.checkpoint.storage.lock import claim, owner_of
from torchscout.checkpoint.storage.owner import Owner
from torchscout.errors import CheckpointError

CLAIMANT = """
import os, sys, time
from torchscout.checkpoint.storage.lock import claim
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
print("held", flush=True)
if then == "race":
    sys.stdin.readline()
    lock.release()
    sys.exit()
time.sleep(60)
"""
NO_LOCKS = ["strace", "-qq", "-o", "/dev/null", "-e", "trace=flock", "-e", "inject=flock:error=ENOLCK"]


@pytest.fixture(params=["flock", "by name"])
def before(request: pytest.FixtureRequest) -> list[str]:
    """What a claimant is started with: the second kind runs where the kernel says that there are no locks."""
    if request.param == "flock":
        return []
    if shutil.which("strace") is None or subprocess.run([*NO_LOCKS, "true"], check=False).returncode:
        pytest.skip("this machine does not let tests change what system calls return")
    return NO_LOCKS


@contextmanager
def claimant(
    folder: Path, *, job: str = "ours", run: str = "", then: str = "hold", before: list[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that tries to hold the folder, and what it says; it is gone afterwards."""
    process = subprocess.Popen(
        [*(before or []), sys.executable, "-c", CLAIMANT, str(folder), job, run, then],
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


def own_pid(process: subprocess.Popen[str], before: list[str]) -> int:
    """Of the claimant itself, which a tracer may have started."""
    return only_child(process.pid) if before else process.pid


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_a_second_job_is_refused_with_the_owner_of_the_folder(tmp_path: Path, before: list[str]):
    with claimant(tmp_path, job="first", before=before) as (process, answer):
        assert answer == "held"
        with claimant(tmp_path, job="second", before=before) as (_, outcome):
            owner = f"job 'first', pid {own_pid(process, before)} on {socket.gethostname()}, since 20"
            assert outcome.startswith(f"refused: {tmp_path} is in use by {owner}")
            assert ("has no locks; that process is alive" in outcome) == bool(before)


def test_a_second_job_of_the_same_name_is_refused(tmp_path: Path, before: list[str]):
    with (
        claimant(tmp_path, before=before) as (_, first),
        claimant(tmp_path, before=before) as (_, second),
    ):
        assert first == "held"
        assert second.startswith("refused: ")


def test_a_killed_owners_folder_is_free(tmp_path: Path, before: list[str]):
    with claimant(tmp_path, before=before) as (process, answer):
        assert answer == "held"
        end(process)
        with claimant(tmp_path, job="next", before=before) as (_, outcome):
            assert outcome == "held"


def test_a_stopped_owner_is_alive(tmp_path: Path, before: list[str]):
    with claimant(tmp_path, before=before) as (process, answer):
        assert answer == "held"
        os.kill(own_pid(process, before), signal.SIGSTOP)
        with claimant(tmp_path, before=before) as (_, outcome):
            assert outcome.startswith("refused: ")


def race(folder: Path, run: str = "", before: list[str] | None = None) -> list[str]:
    """What eight claimants say that begin at the same moment, and stay until all have spoken."""
    command = [*(before or []), sys.executable, "-c", CLAIMANT, str(folder), "racer", run, "race"]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    assert all(racer.stdout and racer.stdout.readline() == "ready\n" for racer in racers)
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.stdout.readline() for racer in racers if racer.stdout]
    for racer in racers:
        racer.communicate("")
    return answers


def test_of_many_claimants_of_a_dead_owners_folder_exactly_one_wins(tmp_path: Path, before: list[str]):
    for attempt in range(2):
        with claimant(tmp_path, job="dead", before=before) as (process, answer):
            assert answer == "held", f"attempt {attempt}"
            end(process)
        outcomes = race(tmp_path, before=before)
        assert outcomes.count("held\n") == 1, outcomes
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
    assert race(tmp_path, run="a") == ["held\n"] * 8
    assert owner_of(tmp_path) is None


def test_a_child_that_outlives_its_trainer_does_not_keep_the_folder(tmp_path: Path, before: list[str]):
    with claimant(tmp_path, then="fork", before=before) as (process, answer):
        assert answer == "held"
        trainer = own_pid(process, before)
        child = only_child(trainer)
        os.kill(trainer, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{trainer}/exe").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(child, 0)
        with claimant(tmp_path, before=before) as (_, outcome):
            assert outcome == "held"


def test_a_released_folder_is_free(tmp_path: Path):
    with claim(tmp_path / "made", "ours") as lock:
        assert owner_of(tmp_path / "made") == lock.owner
        assert (lock.owner.pid, lock.owner.job) == (os.getpid(), "ours")
        with pytest.raises(CheckpointError, match="in use by job 'ours'"):
            claim(tmp_path / "made", "ours")
    assert owner_of(tmp_path / "made") is None
    assert (tmp_path / "made" / "lock").read_bytes() == b"", "nor does the file name anybody"
    lock.release()
    with claim(tmp_path / "made", "theirs"):
        lock.release()
        assert owner_of(tmp_path / "made") is not None, "releasing again gives back nobody else's"


def test_a_runs_secret_is_not_written_down(tmp_path: Path):
    with claim(tmp_path, "ours", "a secret") as lock, claim(tmp_path, "ours", "a secret"):
        assert b"secret" not in (tmp_path / "lock").read_bytes()
        assert "secret" not in str(lock.owner)
        with pytest.raises(CheckpointError, match="in use"):
            claim(tmp_path, "ours", lock.owner.run)


def test_an_unused_folder_has_no_owner_and_gets_no_file(tmp_path: Path):
    assert owner_of(tmp_path) is None
    assert owner_of(tmp_path / "none") is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot lock .*/file: File exists"):
        claim(tmp_path / "file", "ours")


def test_without_locks_another_machines_owner_is_refused_with_what_to_do(tmp_path: Path):
    if shutil.which("strace") is None or subprocess.run([*NO_LOCKS, "true"], check=False).returncode:
        pytest.skip("this machine does not let tests change what system calls return")
    there = Owner("theirs", "elsewhere", 1, 1, "yesterday", "run")
    (tmp_path / "lock.owner").write_bytes(there.to_bytes())
    with claimant(tmp_path, before=NO_LOCKS) as (_, answer):
        assert "in use by job 'theirs', pid 1 on elsewhere, since yesterday" in answer
        assert f"if that process is no longer alive, remove {tmp_path}/lock.owner" in answer
    (tmp_path / "lock.owner").unlink()
    with claimant(tmp_path, before=NO_LOCKS) as (_, answer):
        assert answer == "held"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"job": 1}', b"\xff" * 99])
def test_an_invalid_owner_file_means_no_owner(tmp_path: Path, content: bytes):
    (tmp_path / "lock").write_bytes(content)
    assert owner_of(tmp_path) is None
    with claim(tmp_path, "ours") as lock:
        assert owner_of(tmp_path) == lock.owner
