"""Where checkpoints in memory are, how much of it they may take, and which are deleted."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchscout.checkpoint import memory
from torchscout.checkpoint.folder import claim
from torchscout.checkpoint.memory import (
    check_budget,
    forget,
    forget_old,
    kept_jobs,
    memory_folder,
    memory_root,
    taken_root,
)
from torchscout.cli.main import app
from torchscout.errors import CheckpointError

DAY = 86400
USUAL = f"torchscout-checkpoints-{os.geteuid()}"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHSCOUT_MEMORY", str(tmp_path / "a" / "memory"))
    return tmp_path / "a" / "memory"


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of all users in place of /dev/shm."""
    monkeypatch.delenv("TORCHSCOUT_MEMORY", raising=False)
    monkeypatch.setattr(memory, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_the_memory_folder_is_its_owners_alone(root: Path):
    folder = memory_folder("job-1")
    assert folder == root / "job-1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert memory_folder("job-1") == folder
    folder.chmod(0o755)
    with pytest.raises(CheckpointError, match="belongs to this user alone"):
        memory_folder("job-1")
    for name in ("", "../up", "a/b", ".hidden", "x" * 200):
        with pytest.raises(ValueError, match="a job's name"):
            memory_folder(name)
    root.chmod(0o777)
    with pytest.raises(CheckpointError, match="belongs to this user alone"):
        memory_folder("job-2")
    assert taken_root(memory_root()) is None, "who has chosen a folder gets no other"


def test_without_a_variable_memory_is_the_shared_memory_file_system(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHSCOUT_MEMORY", raising=False)
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no shared-memory file system")
    folder = memory_folder("test-of-the-folder")
    assert folder == Path(f"/dev/shm/{USUAL}/test-of-the-folder")
    folder.rmdir()


def _of_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)


def _for_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


TAKEN = {
    "another user's": _of_another_user,
    "everybody's": _for_all,
    "a file": Path.touch,
    "a link": lambda path: path.symlink_to(path.parent),
    "a broken link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_if_the_usual_folder_is_not_the_users_own_another_one_is_taken(
    shm: Path, take: Callable[[Path], None]
):
    take(shm / USUAL)
    take(shm / f"{USUAL}.1")
    folder = memory_folder("job")
    assert folder == shm / f"{USUAL}.2" / "job"
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert f"because {shm / USUAL} is not a folder that belongs to this user alone" in str(
        taken_root(memory_root())
    )
    assert memory_folder("job") == folder, "the next process of this user finds it again"
    for name in (USUAL, f"{USUAL}.1"):
        (shm / name).rename(shm / f"{name}.gone")
    assert memory_folder("job") == folder, "also when the reason is gone"


def test_a_folder_of_the_users_own_needs_no_other_name(shm: Path):
    assert memory_folder("job") == shm / USUAL / "job"
    assert taken_root(memory_root()) is None


def test_who_finds_every_name_taken_is_told(shm: Path):
    for name in (USUAL, *(f"{USUAL}.{number}" for number in range(1, 100))):
        (shm / name).touch()
    with pytest.raises(CheckpointError, match=f"cannot keep checkpoints in {shm / USUAL}: "):
        memory_folder("job")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir(mode=0o700)
    return tmp_path / "memory"


def test_the_budget_message_has_the_numbers(folder: Path):
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    assert check_budget(1000, 3, 3000, folder) == 3000
    assert abs(check_budget(1000, 3, None, folder) - free // 2) < free // 4
    with pytest.raises(CheckpointError, match=r"need 3 x 1.5 KiB = 4.5 KiB in .*, and 4.0 KiB are allowed"):
        check_budget(1536, 3, 4096, folder)
    with pytest.raises(CheckpointError, match=r"half of the .*iB free\); set memory_budget"):
        check_budget(free, 3, None, folder)
    with pytest.raises(CheckpointError, match=r"memory_budget; .* are free"):
        check_budget(free, 3, 10 * free, folder)


def test_what_the_job_holds_already_counts_as_free(folder: Path):
    (folder / "old").write_bytes(bytes(64 << 20))
    empty = folder.with_name("empty")
    empty.mkdir()
    more = check_budget(1, 1, None, folder) - check_budget(1, 1, None, empty)
    assert more > 16 << 20


def test_a_budget_in_memory_is_of_what_is_available_and_not_of_the_file_system():
    """Half of 120 GiB were allowed where 22 GiB were available."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert check_budget(1, 1, None, Path(folder), available=lambda: 1 << 20) == 1 << 19
        with pytest.raises(CheckpointError):
            check_budget(1 << 20, 1, None, Path(folder), available=lambda: 1 << 20)


def test_a_job_may_have_again_what_its_earlier_checkpoints_take():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        with (folder / "shard").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 3 << 18)
        assert check_budget(3 << 18, 1, None, folder, available=lambda: 1 << 18) == 3 << 18
        with pytest.raises(CheckpointError):
            check_budget((3 << 18) + 1, 1, None, folder, available=lambda: 1 << 18)


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
    with claim(used, "used"), claim(own, "own"):
        assert forget_old(root, own, 7.0) == ["old"]
    assert {each.name for each in root.iterdir()} == {each.name for each in (recent, used, own)}
    assert not old.exists()


def test_the_command_shows_and_deletes_and_refuses_a_job_that_runs(root: Path):
    keep("ended")
    running = keep("running")
    with claim(running, "running"):
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
        assert [each.name for each in root.iterdir()] == ["running"]


CLAIMANT = """
import sys
from pathlib import Path
from torchscout.checkpoint.folder import claim, owner_of
from torchscout.errors import CheckpointError
root, own = Path(sys.argv[1]), sys.argv[2]
claimed = 0
while claimed < 50:
    try:
        with claim(root / "job", "job"):
            (root / "job" / "mine").write_text(own)
            assert owner_of(root / "job").is_this_process
            assert (root / "job" / "mine").read_text() == own
            claimed += 1
    except CheckpointError as error:
        assert "in use by" in str(error), error
"""


def test_of_jobs_that_begin_to_use_a_folder_while_it_is_deleted_one_at_a_time_has_it(root: Path):
    root.mkdir(parents=True, mode=0o700)
    jobs = [
        subprocess.Popen([sys.executable, "-c", CLAIMANT, str(root), own], stderr=subprocess.PIPE, text=True)
        for own in ("first", "second")
    ]
    while any(job.poll() is None for job in jobs):
        for each in kept_jobs(root):
            with suppress(CheckpointError):
                forget(each)
    for job in jobs:
        assert job.communicate()[1] == ""
