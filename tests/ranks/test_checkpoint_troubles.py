"""Jobs whose disk fails, whose folder is taken, that hang or compute wrong numbers: what is kept of them."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_jobs import KillPlan, Plan, Result, killed_from_outside, reached, train
from tests.support.ranks import RankError, run_ranks
from tests.support.small_job import until
from tests.support.spread_checkpoints import outcomes
from torchscout.checkpoint import ledger
from torchscout.checkpoint.folder import claim
from torchscout.checkpoint.storage import shards
from torchscout.faults.plan import FaultPlan
from torchscout.faults.storage import can_fill_disks, on_a_small_disk, restore_folder
from torchscout.report.document import examined


def planned(tmp_path: Path, steps: int = 12) -> Plan:
    return Plan(
        "ddp",
        steps,
        interval=1,
        directory=tmp_path / "checkpoints",
        memory=tmp_path / "memory",
        run_dir=tmp_path / "run",
        timeout_seconds=10.0,
    )


def alone(plan: Plan) -> list[dict[int, str]]:
    plain = replace(plan, directory=None, hangs={}, lost_folder=None)
    return [each.bits for each in run_ranks(train, 2, plain, timeout=60)]


def with_a_small_disk(plan: Plan, kilobytes: int, folder: Path, small: Path | None = None) -> list[Result]:
    """The job's files, or what is ``small``, lie in a file system of that size; what each rank tells."""
    if not can_fill_disks():
        pytest.skip("this machine does not let tests mount a file system")
    assert plan.directory is not None
    plan.directory.mkdir(mode=0o700)
    folder.mkdir()
    (folder / "plan").write_bytes(pickle.dumps(plan))
    module = [sys.executable, "-m", "tests.support.spread_checkpoints", str(folder / "plan"), str(folder)]
    found = subprocess.run(
        on_a_small_disk(small or plan.directory, kilobytes, [*module, "0", "1", "--here"]),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    results = [each for each in outcomes(folder, 2) if isinstance(each, Result)]
    assert len(results) == 2, (found.stderr, outcomes(folder, 2))
    assert re.search(r"torchscout: rank [01]: checkpoints: .*No space left", found.stderr), found.stderr
    return results


def size_of_a_shard(plan: Plan) -> int:
    assert plan.memory is not None
    return max(shards.inspect(path).size for path in plan.memory.rglob("*.shard"))


@pytest.mark.long_cases("one rank")
@pytest.mark.parametrize(
    "shares", [pytest.param(0.5, id="nobody", marks=pytest.mark.slow), pytest.param(1.5, id="one rank")]
)
def test_a_full_disk_moves_no_pointer_on_any_rank_and_training_goes_on(tmp_path: Path, shares: float):
    """There is room for nothing, or for one rank's file only."""
    plan = replace(planned(tmp_path), sweep=False)  # what is kept for one grows from check to check
    whole = 96 << 10
    results = with_a_small_disk(plan, int(shares * whole) // 1024 + 24, tmp_path / "outcomes")
    assert 0.9 * whole < size_of_a_shard(plan) < whole, "or the disk has room for something else"
    assert [each.bits for each in results] == alone(plan)
    for each in results:
        assert each.status["durable"] == []
        assert each.status["latest"] == each.status["verified"] == 11
        assert each.failures == []
    problems = [[one for one in each.status["problems"] if "No space left" in one] for each in results]
    assert any(problems), "and it is said"
    if shares < 1:
        assert all(problems)


@pytest.mark.slow
def test_a_folder_that_is_lost_later_moves_no_pointer_and_memory_still_has_it_all(tmp_path: Path):
    plan = replace(planned(tmp_path), lost_folder=6)
    results = run_ranks(train, 2, plan, timeout=60)
    expected = alone(plan)
    assert [each.bits for each in results] == expected
    for each in results:
        assert each.status["durable"], "something was written before"
        assert max(each.status["durable"]) <= 6
        assert any("cannot write" in one for one in each.status["problems"]), each.status
    assert plan.directory is not None
    with pytest.raises(RankError) as raised:
        run_ranks(train, 2, replace(plan, steps=14), timeout=60)
    assert str(raised.value).count("CheckpointError: 2 of 2 ranks failed") == 2, raised.value
    restore_folder(plan.directory)
    again = run_ranks(train, 2, replace(plan, steps=14, lost_folder=None), timeout=60)
    assert [each.resumed and each.resumed.step for each in again] == [12, 12]


def test_a_folder_has_one_job(tmp_path: Path):
    plan = planned(tmp_path, 1)
    assert plan.directory is not None
    with claim(plan.directory, "another"), pytest.raises(RankError) as raised:
        run_ranks(train, 2, plan, timeout=60)
    message = str(raised.value)
    assert message.count("torchscout.errors.CheckpointError") == 2
    assert f"pid {os.getpid()}" in message


@pytest.mark.long
def test_a_job_goes_on_undisturbed_while_a_second_one_is_refused_its_folder(tmp_path: Path):
    plan = replace(planned(tmp_path, 100_000), run_dir=tmp_path / "first")
    with (
        ThreadPoolExecutor(1) as thread,
        killed_from_outside(plan, KillPlan((0, 1), 0.0, when=tmp_path / "kill")),
    ):
        first = thread.submit(run_ranks, train, 2, plan, timeout=170)
        try:
            until(lambda: max(reached(plan, 0), default=0) > 4, "the first one trains", 60)
            with pytest.raises(RankError, match="in use by"):
                run_ranks(train, 2, replace(plan, run_dir=tmp_path / "second"), timeout=60)
            then = max(reached(plan, 0))
            until(lambda: max(reached(plan, 0)) > then, "it goes on", 30)
        finally:
            (tmp_path / "kill").touch()
        with pytest.raises(RankError, match="exit code -9"):
            first.result()


def test_captures_of_a_hung_job_are_recovered_after_it_is_killed(tmp_path: Path):
    """One rank never comes to the sum; the other one's main thread waits in it for ever. So no update has
    shown that nothing was written to the state while it was captured last."""
    plan = replace(planned(tmp_path), hangs={1: 6})
    with (
        killed_from_outside(plan, KillPlan((0, 1), 1.0, when=plan.run_dir / "hangs")),
        pytest.raises(RankError) as raised,
    ):
        run_ranks(train, 2, plan, timeout=60)
    assert str(raised.value).count("exit code -9") == 2
    assert [max(reached(plan, rank)) for rank in (0, 1)] == [5, 5], "it hung"
    again = replace(plan, hangs={}, run_dir=tmp_path / "again")
    results = run_ranks(train, 2, again, timeout=60)
    assert [each.resumed and each.resumed.step for each in results] == [4, 4]
    assert [each.bits for each in results] == [
        {step: bits[step] for step in range(5, 13)} for bits in alone(plan)
    ]


def test_a_rank_without_memory_for_a_capture_takes_it_from_all_ranks_alike(tmp_path: Path):
    """One rank has more state than was expected before the first step. Its memory is prepared meanwhile."""
    plan = replace(planned(tmp_path), burden={1: 8 << 20}, late_burden=True, sweep=False)
    results = run_ranks(train, 2, plan, timeout=60)
    assert [each.bits for each in results] == alone(plan)
    assert results[0].roles == results[1].roles
    assert results[1].status["captures"]["skipped"] >= 1
    for each in results:
        assert each.failures == []
        assert each.roles[2][0] is None, "the first generation is no generation"
        assert each.status["latest"] == each.status["verified"] == 11


def test_after_corruption_nothing_is_certified_and_a_restart_is_bitwise_clean(tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=1, at="stack.0.up/weight", step=5, bit=28)
    plan = planned(tmp_path, 9)
    broken = run_ranks(train, 2, replace(plan, faults=faults), timeout=60)
    for each in broken:
        assert each.unfired == 0
        assert ("sdc", 5) in each.incidents
        assert each.status["latest"] == each.status["verified"] == 4
        assert max(each.status["durable"], default=0) <= 4
        assert "corruption was found at step 5" in each.status["reason"]
    assert {each["state"] for each in sdc_of(plan.run_dir)} == {"open"}
    assert plan.memory is not None
    found = {shards.inspect(path).identity.generation.step for path in tmp_path.rglob("*.shard")}
    assert max(found) == 4, "nothing newer was captured"
    for path in plan.memory.glob("*/rank-*.ledger"):
        found = ledger.inspect(path.parent, int(path.stem.removeprefix("rank-")))
        assert found is not None
        assert found.gate.poisoned == 5
    results = run_ranks(train, 2, replace(plan, run_dir=tmp_path / "again"), timeout=60)
    healthy = alone(plan)
    for each, theirs, _ in zip(results, healthy, broken, strict=True):
        assert each.resumed is not None
        assert each.resumed.step == 4
        assert "corruption was found at step 5" in each.resumed.reason
        assert each.bits == {step: theirs[step] for step in range(5, 10)}
        assert each.status["verified"] == 8, "9 is still being sealed"
    assert broken[1].bits[9] != healthy[1][9], "it did harm"
    assert {(each["state"], each["recovered"]) for each in sdc_of(plan.run_dir)} == {("recovered", 4)}
    assert sdc_of(tmp_path / "again") == []


def sdc_of(run_dir: Path) -> list[dict[str, Any]]:
    """As `scout status` shows them."""
    return [each for each in examined(run_dir)["incidents"] if each["manifestation"] == "sdc"]
