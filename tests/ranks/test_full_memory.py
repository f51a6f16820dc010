"""Jobs whose shared memory fills up: certified state stays recoverable, and the problem is reported."""

from __future__ import annotations

import pickle
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks.test_checkpoint_troubles import alone, planned, with_a_small_disk
from tests.support.checkpoint_jobs import Plan, Result, train
from tests.support.ranks import run_ranks
from tests.support.spread_checkpoints import outcomes
from torchscout.faults.storage import can_fill_disks, on_a_small_disk

STEPS, TROUBLE = 16, 6
SIZE, LARGE, LEDGERS = 16 << 20, 1 << 20, 64 << 10
"""Bytes of a file system, of a rank's state in it, and those that ledgers need. Of two ranks there may be six
snapshots."""


def test_a_ledger_that_cannot_be_written_in_memory_costs_no_certified_checkpoint(tmp_path: Path):
    """A folder takes the place of the ledger: a real error at the real call, on every machine."""
    plan = replace(planned(tmp_path, STEPS), blocked_ledger=TROUBLE)
    results = run_ranks(train, 2, plan, timeout=60)
    goes_on_from_the_end(plan, results)


@pytest.mark.long
def test_full_shared_memory_costs_no_certified_checkpoint(tmp_path: Path):
    """The file system of the memory folder has a size of its own, and something else fills it."""
    plan = replace(planned(tmp_path, STEPS), filled_memory=TROUBLE, sweep=False)
    assert plan.memory is not None
    inside = plan.memory / "mounted"  # what is mounted is gone with the job; files on disk stay
    inside.mkdir(parents=True)
    results = with_a_small_disk(replace(plan, memory=inside), 2 << 10, tmp_path / "outcomes", inside)
    goes_on_from_the_end(replace(plan, memory=tmp_path / "new memory"), results)


@pytest.mark.long
def test_a_killed_job_gets_its_memory_again_though_other_programs_have_taken_the_rest(tmp_path: Path):
    """A third of it is in files that were being written, which the next job removes."""
    if not can_fill_disks():
        pytest.skip("this machine does not let tests mount a file system")
    memory = tmp_path / "mounted"
    memory.mkdir()
    plan = replace(planned(tmp_path), memory=memory, burden={0: LARGE, 1: LARGE})
    killed = replace(plan, killed={0: TROUBLE, 1: TROUBLE})
    jobs = []
    for name, each in {"killed": killed, "again": replace(plan, run_dir=tmp_path / "again")}.items():
        folder = tmp_path / f"outcomes of {name}"
        folder.mkdir()
        (folder / "plan").write_bytes(pickle.dumps(each))
        module = [sys.executable, "-m", "tests.support.spread_checkpoints"]
        jobs.append(shlex.join([*module, str(folder / "plan"), str(folder), "0", "1", "--here"]))
    fill = f"head -c {LEDGERS} /dev/zero >room; cat /dev/zero >filler; rm room"
    script = ["sh", "-c", f"{jobs[0]}; (cd {memory}; {fill}); {jobs[1]}"]
    found = subprocess.run(
        on_a_small_disk(memory, SIZE >> 10, script), capture_output=True, text=True, check=False, timeout=120
    )
    for each in outcomes(folder, 2):
        assert isinstance(each, Result), (each, found.stderr)
        assert each.resumed is not None
        assert each.resumed.step == TROUBLE - 1
        assert each.failures == []


def goes_on_from_the_end(plan: Plan, results: list[Result]) -> None:
    assert [each.bits for each in results] == alone(replace(plan, blocked_ledger=None, filled_memory=None))
    for each in results:
        assert each.failures == []
        assert max(each.status["durable"]) > TROUBLE, "files were written after that"
        assert any("rank-" in one and ".ledger" in one for one in each.status["problems"]), each.status
    again = replace(
        plan, blocked_ledger=None, filled_memory=None, steps=STEPS + 2, run_dir=plan.run_dir / "again"
    )
    resumed = [each.resumed for each in run_ranks(train, 2, again, timeout=60)]
    expected = min(max(each.status["durable"]) for each in results)
    assert [each is not None and each.step >= expected for each in resumed] == [True, True], resumed
