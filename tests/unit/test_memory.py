"""Where checkpoints in memory are, and how much of it they may take."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from torchscout.checkpoint.storage.memory import check_budget, memory_folder
from torchscout.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir(mode=0o700)
    return tmp_path / "memory"


def test_the_budget_message_has_the_numbers(folder: Path):
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    assert check_budget(1000, 3, 3000, folder) == 3000
    assert abs(check_budget(1000, 3, None, folder) - free // 2) < free // 4
    with pytest.raises(CheckpointError, match=r"need 3 x 1.5 KiB = 4.5 KiB in .*, and 4 KiB are allowed"):
        check_budget(1536, 3, 4096, folder)
    with pytest.raises(CheckpointError, match=r"half of the .*GiB free\); set memory_budget"):
        check_budget(free, 3, None, folder)
    with pytest.raises(CheckpointError, match=r"memory_budget; .* are free"):
        check_budget(free, 3, 10 * free, folder)


def test_what_the_job_holds_already_counts_as_free(folder: Path):
    (folder / "old").write_bytes(bytes(64 << 20))
    empty = folder.with_name("empty")
    empty.mkdir()
    more = check_budget(1, 1, None, folder) - check_budget(1, 1, None, empty)
    assert more > 16 << 20


def test_the_memory_folder_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHSCOUT_MEMORY", str(tmp_path / "a" / "b"))
    folder = memory_folder("job-1")
    assert folder == tmp_path / "a" / "b" / "job-1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert memory_folder("job-1") == folder
    folder.chmod(0o755)
    with pytest.raises(CheckpointError, match="belongs to this user alone"):
        memory_folder("job-1")
    for name in ("", "../up", "a/b", ".hidden", "x" * 200):
        with pytest.raises(ValueError, match="a job's name"):
            memory_folder(name)


def test_without_a_variable_memory_is_the_shared_memory_file_system(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHSCOUT_MEMORY", raising=False)
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no shared-memory file system")
    folder = memory_folder("test-of-the-folder")
    assert folder == Path(f"/dev/shm/torchscout-checkpoints-{os.geteuid()}/test-of-the-folder")
    folder.rmdir()
