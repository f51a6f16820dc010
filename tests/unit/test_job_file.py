"""Which job a checkpoint folder belongs to, wherever it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import CheckpointGate
from torchscout.checkpoint.storage import job_file
from torchscout.config import JOB_NAME
from torchscout.errors import CheckpointError


def test_the_name_moves_with_the_folder(tmp_path: Path):
    here = tmp_path / "here"
    assert job_file.name_in(here) is None
    job_file.write(here, "run7")
    (tmp_path / "link").symlink_to(here)
    assert {job_file.name_in(each) for each in (here, tmp_path / "link", here / ".." / "here")} == {"run7"}
    here.rename(tmp_path / "there")
    assert job_file.name_in(tmp_path / "there") == "run7"


def test_in_a_folder_of_an_earlier_version_the_ledgers_give_the_name(tmp_path: Path):
    (tmp_path / "rank-0.ledger").write_bytes(b"damaged")
    assert job_file.name_in(tmp_path) is None
    ledger.write(tmp_path, 1, CheckpointGate(), job="old-1f", world_size=2)
    assert job_file.name_in(tmp_path) == "old-1f"


@pytest.mark.parametrize("text", ["../../etc", "", "a\nb", "a" * 2000])
def test_a_file_that_holds_no_name_is_refused(tmp_path: Path, text: str):
    (tmp_path / "job").write_text(text)
    with pytest.raises(CheckpointError, match="does not hold the name of a job, but "):
        job_file.name_in(tmp_path)


def test_a_name_that_cannot_be_read_is_not_a_new_job(tmp_path: Path):
    (tmp_path / "job").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*job: Is a directory"):
        job_file.name_in(tmp_path)


def test_writing_a_name_replaces_the_previous_one_completely(tmp_path: Path):
    job_file.write(tmp_path, "a-long-name")
    job_file.write(tmp_path, "short")
    assert job_file.name_in(tmp_path) == "short"
    assert (tmp_path / "job").read_bytes() == b"short\n"


def test_all_ranks_agree_on_one_name():
    for wanted, found in ((None, [None, "a", "a"]), ("a", [None, None]), ("a", ["a", None])):
        assert job_file.agreed_name(wanted, Path("x"), found) == "a"


def test_a_new_folder_gets_a_name_that_no_other_has_and_that_can_be_a_folders():
    begins = {"/data/my run": "my_run-", "/data/.-run": "run-", "/": "job-", "/..": "job-"}
    for folder, begin in {**begins, "x" * 200: "x" * 64 + "-"}.items():
        names = [job_file.agreed_name(None, Path(folder), [None]) for _ in range(2)]
        assert names[0] != names[1]
        assert all(JOB_NAME.fullmatch(each) and each.startswith(begin) for each in names)


def test_another_jobs_folder_is_refused_with_a_way_out():
    with pytest.raises(CheckpointError, match=r"'a'.*'b'.*adopt x --as b"):
        job_file.agreed_name("b", Path("x"), ["a", None])
    with pytest.raises(CheckpointError, match=r"x: 'a', 'b'.*adopt"):
        job_file.agreed_name(None, Path("x"), ["a", "b"])
