"""Memory that ended jobs keep: how much there is to take, and how it is given back."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchscout.checkpoint.storage import lock
from torchscout.checkpoint.storage.forgetting import forget_old, kept_jobs
from torchscout.checkpoint.storage.memory import check_budget, memory_folder
from torchscout.cli.main import app
from torchscout.errors import CheckpointError

DAY = 86400
GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHSCOUT_MEMORY", str(tmp_path / "memory"))
    return tmp_path / "memory"


def keep(job: str, days_ago: float = 0) -> Path:
    folder = memory_folder(job)
    shard = folder / "step-0000000001.lineage-0" / "rank-0-of-1.held-by-0.shard"
    shard.parent.mkdir(mode=0o700)
    shard.write_bytes(bytes(8192))
    then = folder.stat().st_mtime - days_ago * DAY
    os.utime(shard, (then, then))
    return folder


def test_only_folders_unused_for_long_are_deleted(root: Path):
    old, recent, used, own = keep("old", 8), keep("recent", 6), keep("used", 8), keep("own", 9)
    holding = lock.claim(used, "used")
    with lock.claim(own, "own"):
        assert forget_old(root, own, 7.0) == ["old"]
    holding.release()
    assert not old.exists()
    assert recent.exists()
    assert used.exists()
    assert own.exists()


def test_the_command_shows_and_deletes_and_refuses_a_job_that_runs(root: Path):
    keep("ended")
    running = keep("running")
    with lock.claim(running, "running"):
        shown = json.loads(CliRunner().invoke(app, ["checkpoint", "forget", "--json"]).stdout)
        assert "or add --all." in CliRunner().invoke(app, ["checkpoint", "forget"]).stdout
        assert [(each["job"], each["forgotten"]) for each in shown["jobs"]] == [
            ("ended", False),
            ("running", False),
        ]
        assert CliRunner().invoke(app, ["checkpoint", "forget", "running", "--yes"]).exit_code == 1
        assert CliRunner().invoke(app, ["checkpoint", "forget", "nobody"]).exit_code == 2
        assert "would be deleted" in CliRunner().invoke(app, ["checkpoint", "forget", "--all"]).output
        assert len(kept_jobs(root)) == 2
        assert CliRunner().invoke(app, ["checkpoint", "forget", "--all", "--yes"]).exit_code == 0
        assert [each.name for each in kept_jobs(root)] == ["running"]


def test_a_budget_in_memory_is_of_what_is_available_and_not_of_the_file_system():
    """Half of 120 GiB were allowed where 22 GiB were available."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert check_budget(1, 1, None, Path(folder), available=lambda: 1 << 20) == 1 << 19
        with pytest.raises(CheckpointError):
            check_budget(1 << 20, 1, None, Path(folder), available=lambda: 1 << 20)


def test_what_another_running_job_may_still_take_is_not_free():
    def allowed(folder: Path) -> int:
        return check_budget(1, 1, None, folder, available=lambda: 1 << 20)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        mine, other = Path(memory, "mine"), Path(memory, "other")
        mine.mkdir()
        with lock.claim(other, "other"):
            assert check_budget(1, 1, 1 << 18, other, available=lambda: 1 << 20) == 1 << 18
            (other / "taken").write_bytes(bytes(1 << 17))  # of a quarter of what is free, the half
            taken = (other / "taken").stat().st_blocks * 512
            assert abs(allowed(mine) - ((1 << 20) - (1 << 18) + taken) // 2) < 1 << 14
        assert abs(allowed(mine) - (1 << 19)) < 1 << 14, "a job that has ended takes no more"
