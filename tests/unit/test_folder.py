"""Which job a checkpoint folder belongs to, wherever it lies, and which process holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from torchscout.checkpoint.folder import (
    Owner,
    agreed_name,
    claim,
    name_in,
    owner_of,
    put_name,
)
from torchscout.config import JOB_NAME
from torchscout.errors import CheckpointError


def test_the_name_moves_with_the_folder(tmp_path: Path):
    here = tmp_path / "here"
    assert name_in(here) is None
    put_name(here, "run7")
    assert (here / "job").read_bytes() == b"run7\n"
    (tmp_path / "link").symlink_to(here)
    assert {name_in(each) for each in (here, tmp_path / "link", here / ".." / "here")} == {"run7"}
    here.rename(tmp_path / "there")
    assert name_in(tmp_path / "there") == "run7"


@pytest.mark.parametrize("text", ["../../etc", "", "a\nb", "a" * 2000])
def test_a_file_that_holds_no_name_is_refused(tmp_path: Path, text: str):
    (tmp_path / "job").write_text(text)
    with pytest.raises(CheckpointError, match="does not hold the name of a job, but "):
        name_in(tmp_path)


def test_a_name_that_cannot_be_read_is_not_a_new_job(tmp_path: Path):
    (tmp_path / "job").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*job: not a regular file"):
        name_in(tmp_path)


def test_of_two_jobs_that_begin_in_one_folder_the_first_has_it(tmp_path: Path):
    put_name(tmp_path, "first")
    put_name(tmp_path, "first")
    with pytest.raises(CheckpointError, match="belongs to job 'first', not to 'second'"):
        put_name(tmp_path, "second")
    assert name_in(tmp_path) == "first"


def test_all_ranks_agree_on_one_name():
    for wanted, found in ((None, [None, "a", "a"]), ("a", [None, None]), ("a", ["a", None])):
        assert agreed_name(wanted, Path("x"), found) == "a"


def test_a_new_folder_gets_a_name_that_no_other_has_and_that_can_be_a_folders():
    begins = {"/data/my run": "my_run-", "/data/.-run": "run-", "/": "job-", "/..": "job-"}
    for folder, begin in {**begins, "x" * 200: "x" * 64 + "-"}.items():
        names = [agreed_name(None, Path(folder), [None]) for _ in range(2)]
        assert names[0] != names[1]
        assert all(JOB_NAME.fullmatch(each) and each.startswith(begin) for each in names)


def test_another_jobs_folder_is_refused_with_a_way_out():
    with pytest.raises(CheckpointError, match=r"'a'.*'b'.*adopt x --as b"):
        agreed_name("b", Path("x"), ["a", None])
    with pytest.raises(CheckpointError, match=r"x: 'a', 'b'.*adopt"):
        agreed_name(None, Path("x"), ["a", "b"])


def test_a_released_folder_is_free(tmp_path: Path):
    with claim(tmp_path / "made", "ours") as lock:
        assert owner_of(tmp_path / "made") == lock.owner
        assert (lock.owner.pid, lock.owner.job, lock.problem) == (os.getpid(), "ours", None)
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


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"job": 1}', b"\xff" * 99])
def test_an_invalid_owner_file_means_no_owner(tmp_path: Path, content: bytes):
    (tmp_path / "lock").write_bytes(content)
    assert owner_of(tmp_path) is None
    with claim(tmp_path, "ours") as lock:
        assert owner_of(tmp_path) == lock.owner


def test_an_owner_that_cannot_be_named_is_an_owner(tmp_path: Path):
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert owner_of(tmp_path) is not None
        with pytest.raises(CheckpointError, match="in use by an unidentified process"):
            claim(tmp_path, "ours")


def test_an_owner_is_read_as_it_was_written():
    own = Owner.own("job", "run")
    assert Owner.from_bytes(own.to_bytes()) == own
    assert own.is_this_process
