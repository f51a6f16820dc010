"""Damage to files is exactly what it says, and says what must come of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoint_folders import RANKS, make_disk, make_memory
from torchscout.faults.storage import (
    Cut,
    Delete,
    FlipFileBit,
    copies,
    lose_folder,
    on_a_small_disk,
    restore_folder,
    spoil,
)


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "sealed"
    path.write_bytes(bytes(range(100)))
    path.chmod(0o400)
    return path


@pytest.mark.parametrize(("at", "byte"), [(0.0, 0), (0.5, 50), (1.0, 99)])
def test_one_bit_of_a_file_flips(sealed: Path, at: float, byte: int):
    spoil([sealed], FlipFileBit(at, bit=6))
    changed = [old ^ new for old, new in zip(range(100), sealed.read_bytes(), strict=True)]
    assert {place: bits for place, bits in enumerate(changed) if bits} == {byte: 64}


def test_the_end_of_a_file_is_lost(sealed: Path):
    spoil([sealed], Cut(0.25))
    assert sealed.read_bytes() == bytes(range(25))


def test_damage_is_visible_through_an_open_file(sealed: Path):
    with sealed.open("rb") as held:
        spoil([sealed], FlipFileBit(0.0, bit=0))
        assert held.read(1) == b"\x01"


def test_a_damaged_file_must_be_reported_and_a_missing_one_need_not(sealed: Path):
    lost = spoil([sealed], Cut(0.5))
    assert lost.is_reported_in([f"{sealed} is damaged"])
    assert not lost.is_reported_in(["something is damaged"])
    assert spoil([sealed], Delete()).is_reported_in([])
    assert not sealed.exists()


def test_the_copies_of_a_ranks_state_are_found_in_memory_and_on_disk(tmp_path: Path):
    disk, memory = make_disk(tmp_path / "disk"), make_memory(tmp_path / "memory")
    found = copies([memory, disk], 1, 6)
    assert [path.relative_to(tmp_path).parts[0] for path in found] == ["memory", "memory", "disk"]
    assert {path.name for path in found} == {f"rank-1-of-{RANKS}.held-by-{holder}.shard" for holder in (1, 2)}
    assert [path.name for path in copies([memory], 1, 6, holder=2)] == ["rank-1-of-4.held-by-2.shard"]
    assert copies([disk], 1, 5) == []
    with pytest.raises(ValueError, match="there is no file"):
        spoil(copies([disk], 1, 5), Delete())


def test_a_folder_goes_away_and_comes_back(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "kept").touch()
    lose_folder(folder)
    with pytest.raises(OSError, match="Not a directory"):
        (folder / "more").touch()
    restore_folder(folder)
    assert [path.name for path in folder.iterdir()] == ["kept"]


def test_a_command_is_run_with_a_disk_of_that_size(tmp_path: Path):
    command = on_a_small_disk(tmp_path, 64, ["train", "it"])
    assert command[0] == "unshare"
    assert command[-3:] == [str(tmp_path), "train", "it"]
    assert any("size=64k" in word for word in command)
