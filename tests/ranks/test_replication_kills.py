"""Ranks on two machines, killed while their state is on its way to each other's memory."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint_jobs import Plan, Result, reached
from tests.support.checkpoint_remains import History, newest_complete, whole
from tests.support.machines import Machine, machines, why_impossible
from tests.support.small_job import until
from tests.support.spread_checkpoints import outcomes, spread, started, trainers
from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import Generation

pytestmark = pytest.mark.skipif(why_impossible() is not None, reason=str(why_impossible()))

RANKS = 2
BURDEN = 128 << 20
"""Bytes, so that a copy takes its time."""
PLAN = Plan(
    "ddp",
    8,
    directory=Path("/dev/shm/disk"),  # each machine has a shared-memory file system of its own
    memory=Path("/dev/shm/memory"),
    persist_every=1000,
    burden=dict.fromkeys(range(RANKS), BURDEN),
    timeout_seconds=20.0,
)


def names(count: int) -> dict[str, list[str]]:
    return {f"m{number}": ["127.0.0.1 localhost"] for number in range(count)}


def folders(hosts: Sequence[Machine]) -> list[Path]:
    """Of checkpoints, in memory and in files."""
    places = [host.shared_memory for host in hosts]
    return [folder for place in places for folder in (*place.glob("memory/*"), place / "disk")]


def half_come(host: Machine, after: int) -> list[Path]:
    """Copies of a later generation than this of which a machine has something, and perhaps only a part."""
    found = host.shared_memory.glob("memory/*/step-*/.*.writing")
    late = [path for path in found if int(path.parent.name[5:15]) > after]
    return [path for path in late if path.stat().st_blocks]


def is_durable(folder: Path) -> bool:
    """Whether rank 0 knows of a generation that every rank has written."""
    found = ledger.inspect(folder, 0)
    return found is not None and found.gate.in_files != ()


def until_on_its_way(hosts: Sequence[Machine], life: Plan) -> None:
    """Until a copy has come in part for which nobody waits."""
    paths = [life.run_dir / f"pid-{rank}" for rank in range(RANKS)]
    until(lambda: all(map(Path.exists, paths)), "it trains, and what earlier lives have left is gone", 90)
    last = life.copied_until - 1
    until(lambda: any(half_come(host, after=last) for host in hosts), "state is on its way")


def kill(hosts: Sequence[Machine]) -> None:
    """Every rank there, as nothing can prevent or notice."""
    for pid in [pid for host in hosts for pid in trainers(host)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_machine_lost_in_the_middle_of_a_copy_takes_all_back_to_the_generation_before(tmp_path: Path):
    # Steps 2 and 4 have their copies before training goes on; while 6 is copied, it does not.
    interrupted = replace(PLAN, copied_until=5, hangs={0: 8, 1: 8}, run_dir=tmp_path / "first")
    with machines(tmp_path, names(3)) as (one, two, three):
        running = started((one, two), interrupted, tmp_path / "life")
        until(lambda: half_come(one, after=4), "rank 1's state is on its way", 90)
        kill((two, one))
        for each in running:
            each.wait(30)
        assert outcomes(tmp_path / "life", RANKS) == ["killed"] * RANKS
        assert half_come(one, after=4), "it was killed in the middle"
        left = whole(folders([one]))
        left.pop(Generation(2), None)  # a copy arrives beside the trainer, which may not have retired it yet
        assert left == {Generation(4): {0, 1}, Generation(6): {0}}
        two.kill()
        again = replace(PLAN, run_dir=tmp_path / "again")
        for rank, each in enumerate(spread((one, three), again, tmp_path / "second")):
            assert isinstance(each, Result), each
            assert each.resumed is not None
            assert each.resumed.step == 4, "not 6, which only one rank has"
            assert each.resumed.source == ("its own memory", "rank 0's memory")[rank]
            before, after = reached(interrupted, rank), reached(again, rank)
            assert [after[step] for step in (4, 5, 6)] == [before[step] for step in (4, 5, 6)], "bitwise"
        left_over = [path for path in half_come(one, after=4) if path.parent.name.endswith("lineage-0")]
        assert not left_over, "what was left half done is gone"


@pytest.mark.slow
def test_checks_that_outrun_copies_leave_something_to_go_back_to_without_a_machine(tmp_path: Path):
    interrupted = replace(PLAN, steps=100_000, interval=1, persist_every=3, run_dir=tmp_path / "first")
    with machines(tmp_path, names(3)) as (one, two, three):
        running = started((one, two), interrupted, tmp_path / "life")
        until(lambda: any(map(is_durable, folders([one]))), "something is in files, copies and all", 120)
        kill((two, one))
        for each in running:
            each.wait(30)
        two.kill()
        expected = newest_complete(folders([one]), RANKS)
        assert expected > 0
        again = replace(PLAN, steps=expected + 2, run_dir=tmp_path / "again")
        for rank, each in enumerate(spread((one, three), again, tmp_path / "second")):
            assert isinstance(each, Result), each
            assert each.resumed is not None
            assert each.resumed.step == expected
            assert reached(again, rank)[expected] == reached(interrupted, rank)[expected], "bitwise"


@pytest.mark.slow
def test_killed_again_and_again_while_copying_a_job_goes_on_from_its_newest_complete_generation(
    tmp_path: Path,
):
    chance, history = random.Random(1), History(RANKS)
    plan = replace(PLAN, steps=100_000, interval=1, persist_every=4)
    in_the_middle = lost = 0
    with machines(tmp_path, names(5)) as (one, two, *blank):
        hosts = [one, two]
        for number in range(9):
            expected = newest_complete(folders(hosts), RANKS)
            paced = expected + chance.randint(2, 5)
            life = replace(plan, copied_until=paced, run_dir=tmp_path / f"life-{number}")
            running = started(hosts, life, tmp_path / f"outcomes-{number}")
            until_on_its_way(hosts, life)
            time.sleep(chance.choice((0, chance.uniform(0, 0.5))))
            kill(chance.choice((hosts[:1], hosts[1:], hosts)))
            in_the_middle += any(half_come(host, after=0) for host in hosts)
            time.sleep(chance.choice((0, 0.5)))
            kill(hosts)  # a launcher ends the others, too
            for each in running:
                each.wait(30)
            history.add_run(life, expected)
            place = chance.randrange(RANKS)
            if number % 3 == 2 and newest_complete(folders([hosts[1 - place]]), RANKS):
                hosts[place].kill()
                hosts[place] = blank.pop()
                lost += 1
    history.is_as_uninterrupted(plan)
    assert in_the_middle >= 5
    assert lost
