"""Trainers that are killed or run out of memory while they capture: real processes, real file systems."""

from __future__ import annotations

import multiprocessing
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.snapshot_loop import life, train
from torchscout.checkpoint.storage import shards

LOOP = [sys.executable, "-m", "tests.support.snapshot_loop"]
WIDTH = 512  # 2 MiB of state: parameters and momentum


@pytest.fixture
def memory() -> Iterator[Path]:
    """In memory, as in production, where this machine has such a place."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="torchscout-test-", dir=root) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def server() -> None:
    """From which trainers are forked, with torch imported: they are to be killed while they work."""
    run_ranks(int, 1)


def steps_there(folder: Path) -> list[int]:
    """Of all files under a sealed name, each of which must be whole, and of one piece."""
    steps = []
    for path in folder.glob("step-*/*.shard"):
        report = shards.verify(path)
        assert report.whole, report.problems
        assert report.header is not None
        step = report.header.identity.generation.step
        found = shards.load(path).tree
        tensors = [*found["parameters"].values(), found["slots"][0]["own"]["weight"]["momentum_buffer"]]
        assert all((tensor == float(step)).all() for tensor in tensors), f"a mixed state of step {step}"
        steps.append(step)
    return sorted(steps)


def killed(folder: Path, first: int, seconds: float) -> int:
    """The last step that a trainer said was sealed, before it was killed in the middle of its work."""
    log = folder / "said"
    log.write_text("")
    process = multiprocessing.get_context("forkserver").Process(target=life, args=(folder, first, log))
    process.start()
    deadline = time.monotonic() + 60
    while not log.read_text() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(seconds)
    process.kill()
    process.join()
    (kind, before), *said = (line.split() for line in log.read_text().splitlines())
    assert kind == "ready"
    assert all(each[0] == "sealed" for each in said), said
    return int(said[-1][1]) if said else int(before)


def lives(folder: Path, count: int, longest: float) -> None:
    """A trainer is killed and started again, over and over; each goes on where the last one was."""
    chance, first, unsealed = random.Random(3), 3, 0
    for _ in range(count):
        last = killed(folder, first, chance.uniform(0, longest))
        steps = steps_there(folder)
        assert steps, "something is always there once something was"
        assert steps[-1] in (last, last + 1), "the newest that was sealed is there, or one more"
        assert steps == list(range(max(1, steps[-1] - len(steps) + 1), steps[-1] + 1))
        assert 2 <= len(steps) <= 3 or steps[-1] < 3
        left = [*folder.rglob("*.writing")]
        assert len(left) <= 1
        unsealed += len(left)
        first = steps[-1] + 1
    assert unsealed, "some were killed while they wrote"
    assert first > count, "and they got on"


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_a_trainer_killed_at_any_instant_leaves_its_last_snapshots_whole(
    memory: Path, server: None, kills: int
):
    train(memory, 1, 2, WIDTH, lambda *_: None)
    lives(memory, kills, 0.3)


def mounted(folder: Path, size: str, script: str, *arguments: str) -> str:
    """What is said in a small memory file system of its own."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    whole = f'mount -t tmpfs -o size={size} tmpfs "$0" && {script}'
    command = [*unshare, "sh", "-c", whole, str(folder), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout


@pytest.mark.slow
def test_a_full_memory_file_system_is_a_problem_and_training_goes_on(tmp_path: Path):
    """There is room for two snapshots with head room; the third never appears, and the two that do stay."""
    said = mounted(tmp_path, "8m", '"$@"; find "$0" -type f', *LOOP, str(tmp_path), "1", "5", str(WIDTH))
    lines = said.splitlines()
    assert lines[:3] == ["ready 0", "sealed 1", "sealed 2"]
    for line in lines[3:6]:
        assert re.fullmatch(r"problem no memory for \d+ bytes is ready: .*No space left on device", line)
    assert lines[6] == "done"
    assert len(lines[7:]) == 2
    assert all(line.endswith("held-by-0.shard") for line in lines[7:])


@pytest.mark.slow
def test_memory_that_gets_free_again_is_used(tmp_path: Path):
    script = (
        'dd if=/dev/zero of="$0/other" bs=1M count=12 2>/dev/null; "$@" 1 2 512; rm "$0/other"; "$@" 3 4 512'
    )
    lines = mounted(tmp_path, "12m", script, *LOOP, str(tmp_path)).splitlines()
    assert [line.split()[0] for line in lines] == [
        *("ready", "problem", "problem", "done"),
        *("ready", "sealed", "sealed", "sealed", "sealed", "done"),
    ]
