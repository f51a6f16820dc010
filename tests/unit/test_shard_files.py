"""Shards are found by their names, and deleted only where their generation is named."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.storage.shard_files import ShardFile, remove_shards, shard_files
from torchscout.checkpoint.storage.shard_format import ShardIdentity, encode
from torchscout.checkpoint.storage.shards import path_of, write
from torchscout.errors import CheckpointError

GENERATIONS = [Generation(2), Generation(12), Generation(12, 1), Generation(120)]
STRANGERS = [
    "step-12.lineage-0/rank-0-of-2.held-by-0.shard",
    "step-0000000012.lineage-00/rank-0-of-2.held-by-0.shard",
    "step-00000000012.lineage-0/rank-0-of-2.held-by-0.shard",
    "step-0000000012.lineage-0.old/rank-0-of-2.held-by-0.shard",
    "step-0000000012.lineage-0/rank-0-of-2.held-by-0.shard.bak",
    "step-0000000012.lineage-0/rank-00-of-2.held-by-0.shard",
    "step-0000000012.lineage-0/.rank-0-of-2.held-by-0.shard.abc.writing",
    "rank-0.ledger",
    "notes.txt",
]


def put(folder: Path, generation: Generation, rank: int, holder: int) -> Path:
    identity = ShardIdentity(job="job", mesh="m", world_size=2, rank=rank, generation=generation)
    path = path_of(folder, identity, holder)
    write(path, encode(identity, TrustLevel.LATEST, None, []))
    return path


@pytest.fixture
def full(tmp_path: Path) -> Path:
    for generation in GENERATIONS:
        for rank, holder in [(0, 0), (1, 1), (0, 1), (1, 0)]:
            put(tmp_path, generation, rank, holder)
    return tmp_path


def retire(folder: Path, generations: Collection[Generation]) -> list[Path]:
    return remove_shards(shard_files(folder, generations.__contains__))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_shards_are_found_by_generation_owner_and_holder(full: Path):
    found = shard_files(full)
    assert [each.generation for each in found[::4]] == GENERATIONS
    assert [(each.rank, each.holder, each.is_replica) for each in found[:4]] == [
        (0, 0, False),
        (0, 1, True),
        (1, 0, True),
        (1, 1, False),
    ]
    assert all(each.size == each.path.stat().st_size and each.world_size == 2 for each in found)


def test_only_what_is_asked_for_is_listed(full: Path, monkeypatch: pytest.MonkeyPatch):
    """On a disk that all ranks share, each rank would otherwise read the names of all ranks' shards."""
    read: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (read.append(Path(path).name), scandir(path))[1])
    found = shard_files(full, {Generation(12), Generation(7)}.__contains__, holder=1)
    assert [(each.generation, each.rank, each.holder) for each in found] == [
        (Generation(12), 0, 1),
        (Generation(12), 1, 1),
    ]
    assert read == [full.name, "step-0000000012.lineage-0"]
    assert [(each.rank, each.holder) for each in shard_files(full, owner=0)] == [(0, 0), (0, 1)] * 4
    assert shard_files(full, owner=0, holder=11) == []


def test_any_name_that_a_shard_is_given_is_found_again(tmp_path: Path):
    chance = random.Random(3)
    for _ in range(50):
        step, lineage, size, holder = (10 ** chance.randrange(12) + chance.randrange(10) for _ in range(4))
        generation, rank = Generation(step, lineage), chance.randrange(size)
        identity = ShardIdentity(job="j", mesh="m", world_size=size, rank=rank, generation=generation)
        path = path_of(tmp_path, identity, holder)
        path.parent.mkdir(parents=True)
        path.touch()
        assert shard_files(tmp_path) == [ShardFile(path, generation, rank, size, holder)]
        path.unlink()
        path.parent.rmdir()


def test_other_files_are_neither_found_nor_deleted(tmp_path: Path):
    for name in STRANGERS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    before = files(tmp_path)
    assert shard_files(tmp_path) == []
    assert retire(tmp_path, [Generation(12), Generation(1)]) == []
    assert files(tmp_path) == before


def test_only_the_named_generations_go_and_their_folders_with_them(full: Path):
    removed = retire(full, [Generation(12), Generation(120), Generation(7)])
    assert len(removed) == 8
    assert {each.generation for each in shard_files(full)} == {Generation(2), Generation(12, 1)}
    assert sorted(path.name for path in full.iterdir()) == [
        "step-0000000002.lineage-0",
        "step-0000000012.lineage-1",
    ]


def test_deleting_again_or_where_nothing_is_does_nothing(full: Path):
    gone = shard_files(full)
    assert retire(full, GENERATIONS)
    assert retire(full, GENERATIONS) == []
    assert len(remove_shards(gone)) == len(gone), "what another has deleted meanwhile is deleted"


def test_a_folder_in_which_something_is_being_written_stays(full: Path):
    busy = full / "step-0000000002.lineage-0" / ".rank-0-of-2.held-by-0.shard.abc.writing"
    busy.touch()
    retire(full, GENERATIONS)
    assert files(full) == {busy.parent.name, f"{busy.parent.name}/{busy.name}"}


def test_a_linked_folder_is_not_entered(full: Path, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "step-0000000002.lineage-0").symlink_to(full / "step-0000000002.lineage-0")
    assert retire(elsewhere, [Generation(2)]) == []
    assert len(shard_files(full)) == 16


RETIRE = """
import os, sys
from pathlib import Path
from torchscout.checkpoint.gate import Generation
from torchscout.checkpoint.storage.shard_files import remove_shards, shard_files
from torchscout.errors import CheckpointError
os.setuid(65534)
try:
    remove_shards(shard_files(sys.argv[1], [Generation(2), Generation(12)].__contains__))
except CheckpointError as error:
    print(error)
"""


def test_what_cannot_be_deleted_is_said_and_the_rest_is_deleted(full: Path):
    """As a user who owns one of the two folders: four files stay, and the other folder, empty, too."""
    if os.getuid():
        pytest.skip("only root can become somebody else")
    for parent in [full, *full.parents]:
        if parent.name.startswith(("pytest-", "popen-", full.name)):  # pytest's own, not /tmp
            parent.chmod(0o755)
    for each in full.iterdir():
        each.chmod(0o755)
    os.chown(full / "step-0000000012.lineage-0", 65534, 65534)
    done = subprocess.run(
        [sys.executable, "-c", RETIRE, str(full)], capture_output=True, text=True, check=True
    )
    assert "could not delete 5 files or folders; " in done.stdout
    assert "step-0000000002.lineage-0/rank-0-of-2.held-by-0.shard: Permission denied" in done.stdout
    assert Generation(12) not in {each.generation for each in shard_files(full)}


def test_a_folder_that_cannot_be_read_is_one_clear_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"cannot read .*/none: No such file or directory"):
        shard_files(tmp_path / "none")
