"""A shard that arrives piece by piece, and the file of a retired copy that it may be received into."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.replica_ranks import identity, seal
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.incoming import IncomingShard
from torchscout.checkpoint.storage.shards import path_of
from torchscout.checkpoint.storage.spare_file import SpareFile
from torchscout.errors import CheckpointError, DamagedError

SIZE = 3 << 20


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    return seal(tmp_path / "made", 0, 1, SIZE).read_bytes()


def received(memory: Path, data: bytes, piece: int, spare: SpareFile | None = None) -> Path:
    shard = IncomingShard(memory, identity(0, 1), 1, len(data), spare)
    try:
        for start in range(0, len(data), piece):
            shard.append(data[start : start + piece])
        return shard.seal()
    finally:
        shard.discard()


def test_it_is_sealed_whatever_the_pieces_are(tmp_path: Path, data: bytes):
    small = seal(tmp_path / "small", 0, 1, 3).read_bytes()
    for whole, piece in [(data, 77_777), (data, 1 << 20), (data, 1 << 22), (small, 1)]:
        path = received(tmp_path / "b", whole, piece)
        assert path == path_of(tmp_path / "b", identity(0, 1), 1)
        assert path.read_bytes() == whole
        assert shards.verify(path).whole
        assert path.stat().st_mode & 0o777 == 0o400
        path.unlink()


def test_a_flipped_bit_leaves_nothing(tmp_path: Path, data: bytes):
    for place in (0, 9, 30, 60, 300, SIZE // 2, -20, -1):
        damaged = bytearray(data)
        damaged[place] ^= 4
        with pytest.raises(DamagedError):
            received(tmp_path / "b", bytes(damaged), 1 << 20)
        assert not [path for path in (tmp_path / "b").rglob("*") if path.is_file()]


def test_damage_is_found_before_the_rest_has_arrived(tmp_path: Path, data: bytes):
    shard = IncomingShard(tmp_path / "b", identity(0, 1), 1, len(data))
    with pytest.raises(DamagedError, match="the header is damaged"):
        shard.append(data[:100] + b"x" + data[101:4096])
    shard.discard()


def test_too_few_and_too_many_bytes_are_refused(tmp_path: Path, data: bytes):
    shard = IncomingShard(tmp_path / "b", identity(0, 1), 1, len(data))
    shard.append(data)
    with pytest.raises(DamagedError, match="received more than the announced"):
        shard.append(b"x")
    shard.discard()
    shard = IncomingShard(tmp_path / "b", identity(0, 1), 1, len(data))
    shard.append(data[:-1])
    with pytest.raises(DamagedError, match=f"only {len(data) - 1} of {len(data)} bytes"):
        shard.seal()


def test_another_state_than_the_announced_one_is_refused(tmp_path: Path, data: bytes):
    shard = IncomingShard(tmp_path / "b", identity(0, 2), 1, len(data))
    with pytest.raises(DamagedError, match="announced as the state of rank 0 of 2 at step 2"):
        shard.append(data)
    shard.discard()


def test_a_discarded_shard_returns_its_memory(tmp_path: Path, data: bytes):
    before = len([*Path("/proc/self/fd").iterdir()])
    shard = IncomingShard(tmp_path / "b", identity(0, 1), 1, len(data))
    shard.append(data[:SIZE])
    shard.discard()
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert str(tmp_path / "b") not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("size", [1, SIZE, 2 * SIZE])
def test_a_spare_file_of_any_size_becomes_the_next_copy(tmp_path: Path, data: bytes, size: int):
    retired = seal(tmp_path / "b", 1, 9, size)
    number = retired.stat().st_ino
    path = received(tmp_path / "b", data, 1 << 20, SpareFile(retired, tmp_path / "b"))
    assert path.read_bytes() == data
    assert path.stat().st_ino == number
    assert path.stat().st_mode & 0o777 == 0o400
    assert not retired.exists()


def test_what_a_spare_file_had_counts_for_nothing(tmp_path: Path, data: bytes):
    """It has the very bytes that are announced, and they are not sent again."""
    retired = received(tmp_path / "b", data, 1 << 20)
    shard = IncomingShard(tmp_path / "b", identity(0, 1), 1, len(data), SpareFile(retired, tmp_path / "b"))
    shard.append(data[: SIZE // 2])
    with pytest.raises(DamagedError, match="only"):
        shard.seal()
    assert not retired.exists()


def test_a_file_that_somebody_reads_is_not_used_again(tmp_path: Path):
    path = seal(tmp_path / "b", 0, 1)
    data = path.read_bytes()
    with path.open("rb") as reader:
        with pytest.raises(BlockingIOError):
            SpareFile(path, tmp_path / "b")
        assert not path.exists()
        assert not [*(tmp_path / "b").glob(".spare*")]
        assert reader.read() == data


def test_a_spare_file_is_not_cleaned_while_its_owner_lives(tmp_path: Path):
    spare = SpareFile(seal(tmp_path / "b", 0, 1), tmp_path / "b")
    assert shards.clean(tmp_path / "b") == []
    os.close(spare.file)
    assert shards.clean(tmp_path / "b") == [spare.path]


def test_a_spare_file_is_gone_if_there_is_no_space(tmp_path: Path):
    spare = SpareFile(seal(tmp_path / "b", 0, 1), tmp_path / "b")
    with pytest.raises(CheckpointError, match="too little space"):
        IncomingShard(tmp_path / "b", identity(0, 1), 1, 1 << 55, spare)
    assert not spare.path.exists()
