"""Shards in files: whole or absent, never overwritten, damage found and named."""

from __future__ import annotations

import itertools
import os
import stat
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.states import save
from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.memory import check_budget
from torchscout.checkpoint.storage.shard_format import ShardIdentity, decode, encode
from torchscout.checkpoint.storage.shards import clean, inspect, load, path_of, verify, write
from torchscout.errors import CheckpointError, DamagedError

IDENTITY = ShardIdentity(job="job", mesh="replica=2", world_size=2, rank=1, generation=Generation(12))


def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "scale": torch.tensor(0.5)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.full((5,), float("nan"))}}},
        "rng": np.arange(4, dtype=np.uint32),
        "loader": {"epoch": 2},
        "lr": 1e-3,
    }


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = path_of(tmp_path, IDENTITY, holder=1)
    save(path, IDENTITY, TrustLevel.VERIFIED, state())
    return path


def test_state_comes_back_bitwise(sealed: Path):
    found = load(sealed)
    assert (found.header.identity, found.header.role) == (IDENTITY, TrustLevel.VERIFIED)
    assert repr(found.tree) == repr(state())
    weight = found.tree["model"]["weight"]
    assert torch.equal(weight.view(torch.int16), state()["model"]["weight"].view(torch.int16))
    weight += 1  # is memory of its own


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path):
    tensor = torch.randn(3 << 20)  # 12 MiB, more than verify reads at once
    save(tmp_path / "a", IDENTITY, TrustLevel.LATEST, tensor)
    assert verify(tmp_path / "a").whole
    assert torch.equal(load(tmp_path / "a").tree, tensor)


def test_tensors_that_lie_otherwise_in_memory_come_back_too(tmp_path: Path):
    """Each is made dense first, and that copy must live until it is written."""
    strided = {index: torch.randn(300, 400).T for index in range(8)}
    save(tmp_path / "a", IDENTITY, TrustLevel.LATEST, strided)
    found = load(tmp_path / "a").tree
    assert all(torch.equal(found[index], each) for index, each in strided.items())


def test_a_replica_is_the_same_bytes_under_its_holders_name(sealed: Path, tmp_path: Path):
    path = path_of(tmp_path, IDENTITY, holder=0)
    decode(sealed.read_bytes())
    write(path, [sealed.read_bytes()])
    assert path != sealed
    assert repr(load(path).tree) == repr(state())


def test_generations_owners_and_holders_have_files_of_their_own():
    identities = [
        ShardIdentity(job="j", mesh="m", world_size=2, rank=rank, generation=Generation(step, lineage))
        for rank in (0, 1)
        for step in (1, 10)
        for lineage in (0, 1)
    ]
    assert len({path_of("d", each, holder) for each in identities for holder in (0, 1)}) == 16


def test_a_sealed_file_is_its_owners_alone_and_whole(sealed: Path):
    assert stat.S_IMODE(sealed.stat().st_mode) == 0o400
    assert [*sealed.parent.iterdir()] == [sealed]
    header, report = inspect(sealed), verify(sealed)
    assert header.identity == IDENTITY
    assert [entry.name for entry in header.entries][:2] == ["model/weight", "model/scale"]
    assert (report.whole, report.damaged, report.header) == (True, (), header)


def test_a_sealed_file_is_never_overwritten(sealed: Path):
    before = sealed.read_bytes()
    with pytest.raises(CheckpointError, match="is sealed and is not overwritten"):
        save(sealed, IDENTITY, TrustLevel.LATEST, {})
    assert sealed.read_bytes() == before
    assert [*sealed.parent.iterdir()] == [sealed]


def damaged(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> Path:
    other = path.with_name("damaged")
    other.unlink(missing_ok=True)
    other.write_bytes(change(bytearray(path.read_bytes())))
    return other


def flip(bit: int) -> Callable[[bytearray], bytearray]:
    def flipped(data: bytearray) -> bytearray:
        data[bit // 8] ^= 1 << bit % 8
        return data

    return flipped


def test_every_flipped_bit_and_every_truncation_of_a_file_is_found(tmp_path: Path):
    path = tmp_path / "a"
    state = [torch.tensor(1), torch.zeros(0), torch.ones(3, dtype=torch.bool)]
    save(path, IDENTITY, TrustLevel.LATEST, state)
    size = path.stat().st_size
    changes = [flip(bit) for bit in range(size * 8)]
    changes += [lambda data, length=length: data[:length] for length in range(size)]
    for number, change in enumerate(changes):
        other = damaged(path, change)
        assert not verify(other).whole, number
        with pytest.raises(DamagedError):
            load(other)


def test_every_damaged_tensor_is_named_and_the_others_are_not(sealed: Path):
    entries = inspect(sealed).entries
    wanted = [entries[0], entries[3]]

    def change(data: bytearray) -> bytearray:
        for entry in wanted:
            data[entry.offset + entry.length // 2] ^= 4
        return data

    report = verify(damaged(sealed, change))
    assert report.damaged == ("model/weight", "optimizer/state/0/exp_avg")
    assert report.header is not None
    with pytest.raises(DamagedError, match=r"damaged: tensor 'model/weight' is damaged"):
        load(damaged(sealed, change))


@pytest.mark.parametrize("read", [inspect, load])
def test_a_file_that_is_not_a_shard_is_refused_by_name(tmp_path: Path, read: Callable[[Path], object]):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("text", "too few"), ("folder", "not a reg"), ("pipe", "not a reg")):
        with pytest.raises(CheckpointError, match=f"{name}: .*{message}"):
            read(tmp_path / name)
        assert not verify(tmp_path / name).whole
    with pytest.raises(CheckpointError, match=r"cannot read .*gone: No such file"):
        read(tmp_path / "gone")
    assert verify(tmp_path / "gone").problems


def test_a_document_that_is_no_tree_is_damage(tmp_path: Path):
    write(tmp_path / "a", encode(IDENTITY, TrustLevel.LATEST, {"unknown": 1}, []))
    with pytest.raises(DamagedError, match="a: not the state of a checkpoint"):
        load(tmp_path / "a")


def test_state_that_cannot_be_kept_leaves_no_file(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"a is a builtins\.object"):
        save(tmp_path / "folder" / "a", IDENTITY, TrustLevel.LATEST, {"a": object()})
    assert [*tmp_path.iterdir()] == []


def test_a_folder_in_whose_place_a_file_lies_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/a: "):
        save(tmp_path / "file" / "a", IDENTITY, TrustLevel.LATEST, {})


def test_only_what_dead_writers_left_is_cleaned(sealed: Path, tmp_path: Path):
    """A living writer's temporary file is locked; in other processes this is ``test_shard_writers``."""
    left = sealed.parent / ".rank-0-of-2.held-by-0.shard.0123456789abcdef.writing"
    left.write_bytes(b"half")
    (sealed.parent / "notes.writing").write_text("somebody's own")
    assert clean(tmp_path) == [left]
    assert sorted(each.name for each in sealed.parent.iterdir()) == ["notes.writing", sealed.name]
    assert clean(tmp_path / "nowhere") == []


@pytest.mark.long
def test_folders_that_others_remove_meanwhile_are_passed_over(sealed: Path, tmp_path: Path):
    folder, over, rounds = tmp_path / "step-0000000009.lineage-0", threading.Event(), 0

    def come_and_go() -> None:
        nonlocal rounds
        while not over.is_set():
            folder.mkdir()
            folder.rmdir()
            rounds += 1

    others = threading.Thread(target=come_and_go)
    others.start()
    try:
        for looks in itertools.count():
            assert clean(tmp_path) == []
            assert check_budget(1, 1, None, tmp_path) > 0
            if looks >= 200 and rounds >= 100:
                break
    finally:
        over.set()
        others.join()


def test_a_flipped_bit_in_the_headers_length_allocates_nothing_like_it(tmp_path: Path):
    """The digest is compared before the header is believed to have that length."""
    path = tmp_path / "sealed"
    save(path, IDENTITY, TrustLevel.LATEST, {"weights": torch.zeros(200 << 20, dtype=torch.uint8)})
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(16 + 26 // 8)
        (byte,) = file.read(1)
        file.seek(16 + 26 // 8)
        file.write(bytes([byte ^ 1 << 26 % 8]))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match="the header is damaged"):
            inspect(path)
        assert not verify(path).whole
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
