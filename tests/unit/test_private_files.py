"""Files under names that another user can predict are not followed, truncated or trusted."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from tests.support.run_dirs import read_roster
from tests.unit.test_record import INCIDENT
from tests.unit.test_stacks import SIGNAL
from torchscout.checkpoint import folder as folders
from torchscout.checkpoint import ledger
from torchscout.checkpoint.storage import shards
from torchscout.errors import CheckpointError
from torchscout.observer import monitor, stacks
from torchscout.observer.record import directory
from torchscout.run.folder import RankEntry
from torchscout.run.reader import runs_of
from torchscout.run.writer import RunWriter
from torchscout.utils.private_files import open_to_read


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    path.chmod(0o600)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHSCOUT_RECORDS", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_stack_file_that_is_a_link_is_not_followed(tmp_path: Path, victim: Path):
    registration = stacks.register(tmp_path, SIGNAL)
    try:
        registration.path.unlink()
        registration.path.symlink_to(victim)
        assert stacks.take(os.getpid(), registration.path, SIGNAL, 0.3) == ""
        assert victim.read_text() == "precious"
    finally:
        registration.unregister()
        signal.signal(SIGNAL, signal.SIG_DFL)


@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_a_records_folder_that_others_may_use_is_not_used(home: Path, mode: int):
    home.mkdir()
    home.chmod(mode)
    made = monitor.private_directory()
    assert made.parent != home
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    made.rmdir()
    assert not [*home.iterdir()]


def test_a_records_folder_that_is_a_link_is_not_used(home: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    home.symlink_to(tmp_path / "elsewhere")
    monitor.private_directory().rmdir()
    assert not [*(tmp_path / "elsewhere").iterdir()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_records_folder_of_another_user_is_not_used(home: Path):
    home.mkdir(mode=0o700)
    os.chown(home, 12345, -1)
    made = monitor.private_directory()
    made.rmdir()
    assert made.parent != home


def test_other_files_in_the_records_folder_are_ignored(home: Path):
    """A stray file once made every further job go without hang localization."""
    home.mkdir(mode=0o700)
    (home / "stray").write_text("")
    (home / "dangling").symlink_to(home / "nowhere")
    (home / "closed").mkdir(mode=0o000)
    made = monitor.private_directory()
    assert made.parent == home
    assert (home / "stray").exists()
    assert directory.records_home() == home


LINKED = {
    "the lock": ("lock", folders.owner_of),
    "the lock, to take it": ("lock", lambda folder: folders.claim(folder, "job")),
    "the job's name": ("job", folders.name_in),
    "a ledger": ("rank-0.ledger", lambda folder: ledger.inspect(folder, 0)),
    "a shard": ("a.shard", lambda folder: shards.inspect(folder / "a.shard")),
    "the tensors of a shard": ("a.shard", lambda folder: shards.load(folder / "a.shard")),
    "the state of a shard to copy": ("a.shard", lambda folder: open_to_read(folder / "a.shard")),
    "the runs of a job": ("runs.jsonl", runs_of),
}


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("name", LINKED)
def test_what_is_no_file_in_a_checkpoint_folder_is_neither_followed_nor_waited_for(
    tmp_path: Path, victim: Path, name: str, kind: str
):
    file, read = LINKED[name]
    (folder := tmp_path / "folder").mkdir()
    if kind == "link":
        (folder / file).symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(folder / file)
    else:
        (folder / file).mkdir()
    with pytest.raises((CheckpointError, OSError), match=r"cannot|not a regular file|symbolic"):
        read(folder)
    assert victim.read_text() == "precious"


def test_records_do_not_follow_links_and_are_the_owners_alone(tmp_path: Path, victim: Path):
    run = tmp_path / "run"
    recorder = RunWriter(run, 0)
    recorder.record(INCIDENT)
    assert stat.S_IMODE((run / "incidents" / "rank-0.jsonl").stat().st_mode) == 0o600
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    (run / "incidents" / "rank-0.jsonl").unlink()
    (run / "incidents" / "rank-0.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        recorder.record(INCIDENT)
    assert victim.read_text() == "precious"


def test_a_run_folder_is_its_owners_alone_whoever_makes_it(tmp_path: Path):
    RankEntry.own(0, tmp_path / "record").write(tmp_path / "a" / "run")
    for folder in ("a", "a/run", "a/run/ranks"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a/run/ranks/rank-0.json").stat().st_mode) == 0o600


def test_an_entry_of_the_roster_does_not_follow_links(tmp_path: Path, victim: Path):
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank-0.json").symlink_to(victim)
    RankEntry.own(0, tmp_path / "record").write(tmp_path)
    assert victim.read_text() == "precious"
    assert [each.rank for each in read_roster(tmp_path)] == [0]
