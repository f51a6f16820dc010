"""The gate's state in files: the last complete write is read, or the one before it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.gates import train
from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import CheckpointGate, Generation, Recovered, transition
from torchscout.checkpoint.ledger import Ledgers
from torchscout.checkpoint.storage.inventory import Member, Tier
from torchscout.checkpoint.storage.shard_format import ShardIdentity, digest
from torchscout.checkpoint.storage.shards import path_of
from torchscout.errors import CheckpointError, DamagedError

FIRST = train(CheckpointGate(recipes=2), "hhh")
SECOND = train(CheckpointGate(recipes=2), "hhhhx")


def write(folder: Path, gate: CheckpointGate, rank: int = 1, job: str = "job", world_size: int = 4) -> Path:
    ledger.write(folder, rank, gate, job=job, world_size=world_size)
    return ledger.path_of(folder, rank)


def read(folder: Path, rank: int, job: str | None = None) -> CheckpointGate | None:
    found = ledger.inspect(folder, rank, job=job)
    return None if found is None else found.gate


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def put(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def test_the_last_write_is_read(tmp_path: Path):
    path = write(tmp_path / "made" / "on the way", FIRST)
    assert read(path.parent, 1) == FIRST
    write(path.parent, SECOND)
    assert read(path.parent, 1) == SECOND
    assert ledger.inspect(path.parent, 1) == ledger.Ledger("job", 4, 1, SECOND, before=FIRST)
    assert names(path.parent) == ["rank-1.ledger", "rank-1.ledger.previous"], "nothing else is left"
    assert stat.S_IMODE(path.stat().st_mode) == 0o400


def test_reading_an_empty_folder_gives_nothing(tmp_path: Path):
    write(tmp_path, FIRST, rank=2)
    assert read(tmp_path, 1) is None
    assert read(tmp_path / "none", 1) is None
    assert ledger.ranks_in(tmp_path) == [2]


def test_every_flipped_bit_falls_back_to_the_one_before(tmp_path: Path):
    write(tmp_path, FIRST)
    path = write(tmp_path, SECOND)
    data = path.read_bytes()
    for bit in range(len(data) * 8):
        put(path, flipped(data, bit))
        found = ledger.inspect(tmp_path, 1)
        assert found is not None
        assert found.gate == FIRST
        assert found.doubt is not None
        assert "rank-1.ledger is damaged" in found.doubt


def test_a_torn_file_falls_back_to_the_one_before(tmp_path: Path):
    write(tmp_path, FIRST)
    path = write(tmp_path, SECOND)
    data = path.read_bytes()
    for length in (0, 1, 100, len(data) - 40, len(data) - 2, len(data) - 1):
        put(path, data[:length])
        assert read(tmp_path, 1) == FIRST


def test_a_missing_file_falls_back_to_the_one_before(tmp_path: Path):
    write(tmp_path, FIRST)
    write(tmp_path, SECOND).unlink()
    found = ledger.inspect(tmp_path, 1)
    assert found is not None
    assert found.gate == FIRST
    assert "rank-1.ledger" in str(found.doubt)


def test_two_damaged_files_are_an_error_that_names_both(tmp_path: Path):
    write(tmp_path, FIRST)
    path = write(tmp_path, SECOND)
    put(path, flipped(path.read_bytes(), 77))
    put(previous(path), b"")
    with pytest.raises(DamagedError, match=r"rank-1\.ledger is .*rank-1\.ledger\.previous is "):
        read(tmp_path, 1)
    previous(path).unlink()
    with pytest.raises(DamagedError, match=r"rank-1\.ledger is "):
        read(tmp_path, 1)


def test_a_damaged_file_does_not_displace_the_whole_one_before(tmp_path: Path):
    write(tmp_path, FIRST)
    path = write(tmp_path, SECOND)
    put(path, flipped(path.read_bytes(), 77))
    write(tmp_path, SECOND)
    put(path, b"")
    assert read(tmp_path, 1) == FIRST


def forged(**changes: object) -> bytes:
    body = {"schema": 1, "job": "job", "world_size": 4, "rank": 1, "gate": FIRST.to_json(), **changes}
    text = json.dumps(body).encode()
    return text + b'\n{"xxh3_128":"' + digest(text).encode() + b'"}\n'


@pytest.mark.parametrize(("changes", "message"), [({"schema": 2}, "schema 2"), ({"rank": 3}, "rank 3")])
def test_an_intact_file_with_wrong_fields_is_refused_without_fallback(tmp_path, changes, message):
    write(tmp_path, FIRST)
    put(write(tmp_path, SECOND), forged(**changes))
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, 1)
    assert not isinstance(caught.value, DamagedError)


def test_another_jobs_ledger_is_refused_when_a_job_is_given(tmp_path: Path):
    write(tmp_path, FIRST, job="theirs")
    assert read(tmp_path, 1) == FIRST
    with pytest.raises(CheckpointError, match=r"rank-1\.ledger belongs to job 'theirs', not to 'ours'"):
        read(tmp_path, 1, job="ours")


NONSENSE = [
    {"gate": None},
    {"gate": {**FIRST.to_json(), "accepted_recipes": 2}},
    {"gate": {**FIRST.to_json(), "more": 1}},
    {"job": 3},
    {"world_size": 1},
    {"world_size": "4"},
    {"rank": True},
]


def test_a_sealed_file_that_makes_no_sense_is_damaged(tmp_path: Path):
    bodies = [b"[]", b"3", b"{", b"[" * 100_000]
    sealed = [body + b'\n{"xxh3_128":"' + digest(body).encode() + b'"}\n' for body in bodies]
    for data in [*sealed, *(forged(**changes) for changes in NONSENSE)]:
        put(ledger.path_of(tmp_path, 1), data)
        with pytest.raises(DamagedError):
            read(tmp_path, 1)


def test_a_path_that_is_not_a_file_is_an_error_and_does_not_block(tmp_path: Path):
    os.mkfifo(ledger.path_of(tmp_path, 0))
    with pytest.raises(CheckpointError, match=r"cannot read .*rank-0\.ledger: not a regular file"):
        read(tmp_path, 0)
    ledger.path_of(tmp_path, 1).mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*rank-1\.ledger: not a regular file"):
        read(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"cannot read .*rank-1\.ledger: not a regular file"):
        write(tmp_path, FIRST)


WRITER = """
import itertools, sys
from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import CheckpointGate
print("writing", flush=True)
for step in itertools.count(int(sys.argv[2])):
    ledger.write(sys.argv[1], 0, CheckpointGate(step=step), job="job", world_size=1)
assert "torch" not in sys.modules
"""


def test_a_writer_killed_at_any_instant_leaves_a_whole_state_and_never_an_older_one(tmp_path: Path):
    last = 0
    for attempt in range(200):
        if attempt >= 20 and last > 1:  # on a busy machine it may take longer to write
            break
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(last + 1)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process:
            assert process.stdout.readline() == "writing\n"
            time.sleep(0.002 * attempt)
            process.send_signal(signal.SIGKILL)
        found = ledger.inspect(tmp_path, 0)
        if found is None:  # killed before its first write
            assert last == 0
            continue
        assert found.doubt is None, "the file is whole"
        assert found.gate.step >= last
        last = found.gate.step
    assert last > 1, "they got to write"


def test_a_failed_write_leaves_what_was_there(tmp_path: Path):
    write(tmp_path, FIRST)
    limited = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import CheckpointGate
from torchscout.errors import CheckpointError
try:
    ledger.write({str(tmp_path)!r}, 1, CheckpointGate(), job="job", world_size=4)
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    assert "File too large" in done.stdout
    found = ledger.inspect(tmp_path, 1)
    assert found == ledger.Ledger("job", 4, 1, FIRST)
    assert names(tmp_path) == ["rank-1.ledger"]


def shard(folder: Path, step: int, lineage: int, rank: int, holder: int, of: int = 2) -> Path:
    whose = ShardIdentity(job="job", mesh="m", world_size=of, rank=rank, generation=Generation(step, lineage))
    path = path_of(folder, whose, holder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_a_rank_deletes_what_it_keeps_and_no_ledger_names(tmp_path: Path):
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    gate, _ = transition(train(CheckpointGate(keep=0), "hh"), Recovered(Generation(2)))
    gate = train(gate, "h")
    ledgers = Ledgers(Member(job="job", mesh="m", world_size=2, rank=0), memory, disk)
    for tier in Tier:
        ledgers.write(tier, gate)
    for folder, tier in ((memory, Tier.MEMORY), (disk, Tier.DISK)):
        named = [shard(folder, 3, 1, 0, 0), shard(folder, 3, 1, 1, 0)]
        of_others = [shard(folder, 1, 0, 1, 1), shard(folder, 9, 1, 1, 1), shard(folder, 9, 1, 0, 1)]
        copy = shard(folder, 9, 1, 1, 0)
        unneeded = [shard(folder, 9, 1, 0, 0), shard(folder, 1, 0, 0, 0), shard(folder, 1, 0, 1, 0)]
        of_ranks_that_are_gone = [shard(folder, 1, 0, 2, 2, of=3), shard(folder, 1, 0, 0, 2, of=3)]
        ledgers.delete_unneeded(tier, gate)
        assert all(each.exists() for each in [*named, *of_others])
        assert not any(each.exists() for each in [*unneeded, *of_ranks_that_are_gone])
        assert copy.exists() == (tier is Tier.MEMORY), "in memory its owner has it deleted"


def test_ledgers_of_ranks_that_are_gone_stay_until_this_rank_has_written_its_own(tmp_path: Path):
    for rank in range(3):
        write(tmp_path, FIRST, rank=rank)
    gate, _ = transition(FIRST, Recovered(FIRST.latest))
    ledgers = Ledgers(Member(job="job", mesh="m", world_size=2, rank=0), tmp_path, tmp_path, (FIRST, FIRST))
    ledgers.delete_other_ranks(gate)
    assert ledger.ranks_in(tmp_path) == [0, 1, 2]
    ledgers.write(Tier.DISK, gate)
    ledgers.delete_other_ranks(gate)
    assert ledger.ranks_in(tmp_path) == [0, 1]
