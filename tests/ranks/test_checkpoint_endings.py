"""How a job ends, and what is on disk then: a reboot takes all that was in memory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scenarios.rows import case_id
from tests.support.checkpoint_jobs import KillPlan, Plan, Result, killed_from_outside, reached, train
from tests.support.ranks import RankError, run_ranks
from tests.support.run_dirs import read_ends
from torchscout.checkpoint import ledger

RANKS = 2
ROOT = Path(__file__).parents[2]
ALONE = """
import logging, sys, torch
import torch.distributed as dist
import torchscout
logging.basicConfig(level=logging.INFO, format="%(message)s")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
session = torchscout.enable_resiliency(
    model,
    optimizer,
    replay=torchscout.ReplayConfig(interval=2),
    observer=None,
    checkpoint=torchscout.CheckpointConfig("checkpoints", persist_every=100),
)
print("resumed", session.resume().step)
for step in range(session.step, 4):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("latest", session.status()["checkpoint"]["latest"])
"""
"""One rank, which nobody can be compared with. The last step has a check; then a line of ``LAST_LINES``
follows, and the interpreter exits without ``close``."""
LAST_LINES = {
    "reaches its end": "",
    "raises": "raise ValueError",
    "loads averaged weights": "torch.nn.init.zeros_(model.weight)",
    "raises while it has averaged weights": "torch.nn.init.zeros_(model.weight); raise ValueError",
}


def planned(tmp_path: Path, steps: int = 6) -> Plan:
    """Files by ``persist_every`` would come too late for any of these jobs."""
    return Plan(
        "ddp",
        steps,
        interval=2,
        persist_every=100,
        directory=tmp_path / "checkpoints",
        memory=tmp_path / "memory",
        run_dir=tmp_path / "run",
        timeout_seconds=20.0,
    )


def reboot(plan: Plan) -> None:
    assert plan.memory is not None
    shutil.rmtree(plan.memory)


def went_on(plan: Plan, step: int, source: str | None, more: int = 2) -> list[Result]:
    """The job, started again, begins with this step, and ends as if it had never been interrupted."""
    again = replace(
        plan,
        steps=step + more,
        run_dir=plan.run_dir.with_name("again"),
        hangs={},
        killed={},
        largest_file=None,
    )
    alone = run_ranks(train, RANKS, replace(again, directory=None), timeout=60)
    results = run_ranks(train, RANKS, again, timeout=60)
    for mine, theirs in zip(results, alone, strict=True):
        assert mine.resumed is not None
        assert (mine.resumed.step, mine.resumed.source) == (step, source)
        assert mine.bits == {each: theirs.bits[each] for each in range(step + 1, step + more + 1)}
        assert mine.failures == []
    return results


def test_a_job_that_ends_well_is_on_disk_and_gives_its_memory_back(tmp_path: Path):
    plan = planned(tmp_path)
    for each in run_ranks(train, RANKS, plan, timeout=60):
        assert (each.status["latest"], each.status["capturing"]) == (4, 6), "6 is known to be sealed later"
    assert plan.memory is not None
    assert [*plan.memory.rglob("*.shard")] == [], "what is on disk is not in memory"
    reboot(plan)
    went_on(plan, 6, "its own disk")


def test_the_first_certified_checkpoint_is_written_early(tmp_path: Path):
    plan = replace(planned(tmp_path), killed={0: 6, 1: 6})
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, RANKS, plan, timeout=60)
    reboot(plan)
    went_on(plan, 2, "its own disk")


def test_sigterm_writes_files_though_a_rank_is_blocked_in_a_collective(tmp_path: Path):
    """Rank 1 never comes to the sum in which rank 0 waits."""
    plan = replace(planned(tmp_path), hangs={1: 6})
    with (
        killed_from_outside(plan, KillPlan((0, 1), 2.0, step=5, signal=signal.SIGTERM)),
        pytest.raises(RankError) as raised,
    ):
        run_ranks(train, RANKS, plan, timeout=60)
    assert str(raised.value).count("exit code -15") == RANKS, raised.value
    assert [max(reached(plan, rank)) for rank in range(RANKS)] == [5, 5], "it hung"
    assert {(each.how, each.why) for each in read_ends(plan.run_dir).values()} == {("interrupted", "SIGTERM")}
    reboot(plan)
    went_on(plan, 4, "its own disk")


def test_a_job_that_could_never_capture_anything_says_so_and_can_start_again(tmp_path: Path):
    """Files may be so small that no snapshot fits, in memory or on disk."""
    plan = replace(planned(tmp_path), largest_file=20_000, sweep=False)
    for rank, each in enumerate(run_ranks(train, RANKS, plan, timeout=60)):
        roles = [each.status[name] for name in ("latest", "candidate", "verified", "durable")]
        assert roles == [None, None, None, []]
        assert any("File too large" in one for one in each.status["problems"]), each.status
        assert plan.directory is not None
        found = ledger.inspect(plan.directory, rank)
        assert found is not None
        assert (found.gate.latest, found.gate.verified) == (None, None)
    went_on(plan, 0, None)


def test_a_folder_may_be_renamed_or_reached_by_another_path(tmp_path: Path):
    plan = replace(planned(tmp_path, steps=4), killed={0: 4, 1: 4})
    assert plan.directory is not None
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, RANKS, plan, timeout=60)
    (tmp_path / "link").symlink_to(plan.directory)
    went_on(replace(plan, directory=tmp_path / "link"), 2, "its own memory")
    plan.directory.rename(tmp_path / "renamed")
    renamed = replace(plan, directory=tmp_path / "run" / ".." / "renamed", killed={})
    went_on(renamed, 4, "its own disk")
    with pytest.raises(RankError, match=r"belongs to job 'checkpoints-.*', not to 'other'.*adopt"):
        run_ranks(train, RANKS, replace(renamed, job="other"), timeout=60)


def test_a_crash_between_the_first_check_and_its_capture_begins_anew(tmp_path: Path):
    plan = replace(planned(tmp_path), killed={0: 2, 1: 2}, after_update=True)
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, RANKS, plan, timeout=60)
    for result in went_on(plan, 0, None, more=4):
        assert result.status["latest"] == 2, "and what it keeps can be gone back to"
    went_on(plan, 4, "its own disk")


@pytest.mark.slow_except("raises-while-*")
@pytest.mark.long_cases("raises-while-*")
@pytest.mark.parametrize("how", LAST_LINES, ids=case_id)
def test_a_script_that_ends_without_close_is_on_disk_as_its_last_check_has_seen_it(how: str, tmp_path: Path):
    def printed(last_line: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHSCOUT_MEMORY": str(tmp_path / "memory")}
        done = subprocess.run(
            [sys.executable, "-c", ALONE + last_line],
            check=False,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == int("raise" in last_line), done.stderr
        return done.stdout + done.stderr

    first, is_kept = printed(LAST_LINES[how]), "averaged" not in how
    assert "resumed 0\nlatest 2\n" in first
    what = f"the checkpoint of step 4 is in {tmp_path / 'checkpoints'}"
    why = "step 4 is not kept, because no step began with it and model/weight was changed after the check"
    assert [each in first for each in (what, why)] == [is_kept, not is_kept], first
    shutil.rmtree(tmp_path / "memory")
    assert f"resumed {4 if is_kept else 2}\n" in printed("")
