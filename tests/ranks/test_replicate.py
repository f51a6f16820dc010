"""Copies of state in another machine's memory: real processes, which are killed, stopped and disturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.replica_ranks import PATIENCE, Rank, Wire, files, identity, ranks, seal
from tests.support.small_job import until
from torchscout.checkpoint.replication.placement import replica_holders
from torchscout.checkpoint.storage.shards import path_of, verify
from torchscout.utils.network import new_token

TOKEN = new_token()
LARGE = 40 << 20
"""More than may be on its way at once."""


def until_it_says(rank: Rank, word: str) -> None:
    problems: list[str] = []

    def is_said() -> bool:
        problems.extend(rank.ask("problems"))
        return any(word in each for each in problems)

    until(is_said, f"{word!r} is said")


def copied(owner: Rank, step: int, size: int = 10_000) -> Path:
    """Send the state of this step, and wait until its copy counts."""
    path = seal(owner.memory, owner.rank, step, size)
    owner.ask("send", str(path))
    until(lambda: step in owner.held(), "the copy counts")
    return path


def copy_of(holder: Rank, step: int) -> Path:
    return path_of(holder.memory, identity(0, step), holder=1)


@contextmanager
def half_sent(folder: Path, patience: float = PATIENCE) -> Iterator[tuple[Rank, Rank, Wire, Path]]:
    """An owner, of whose step 1 the holder has half, the wire that holds it up, and the shard."""
    with ranks(folder, TOKEN, "ab", patience=patience) as (owner, holder):
        wire = Wire(holder.address, hold_after=20 << 20)
        owner.ask("connect", [owner.address, wire.address], ["a", "b"])
        for _ in range(8):
            owner.ask("step_took", 0.1)
        path = seal(owner.memory, 0, 1, LARGE)
        owner.ask("send", str(path))
        until(wire.held_up.is_set, "half of it is there")
        yield owner, holder, wire, path
        wire.close()


def test_a_shard_arrives_at_the_holder_bit_for_bit(tmp_path: Path):
    # A busy machine may take seconds for the large one, which must not count as a problem.
    with ranks(tmp_path, TOKEN, "ab", patience=30.0) as (owner, holder):
        for step, size in ((1, 1), (2, LARGE), (3, 4 << 20)):
            assert copied(owner, step, size).read_bytes() == copy_of(holder, step).read_bytes()
        assert owner.ask("problems") == holder.ask("problems") == []
        assert len(files(holder.memory)) == 3


def test_a_copy_that_slows_steps_is_limited_and_still_arrives(tmp_path: Path):
    with half_sent(tmp_path, patience=30.0) as (owner, holder, wire, path):
        for _ in range(4):  # the first is left out, since the copy began in it
            owner.ask("step_took", 0.2)
        assert owner.ask("rate") == 1 << 28
        wire.released.set()
        until(lambda: owner.held() == [1], "the copy counts")
        assert copy_of(holder, 1).read_bytes() == path.read_bytes()
        assert owner.ask("problems") == []


@pytest.mark.parametrize("retires", [0, 1], ids=["owner", "holder"])
def test_the_file_of_a_retired_copy_is_used_for_the_next(tmp_path: Path, retires: int):
    with ranks(tmp_path, TOKEN, "ab", patience=30.0) as (owner, holder):
        numbers = []
        for step in (1, 2, 3):
            path, copy = copied(owner, step, LARGE), copy_of(holder, step)
            assert copy.read_bytes() == path.read_bytes()
            numbers.append(copy.stat().st_ino)
            if step == 2:
                (owner, holder)[retires].ask("retire", [[1, 0]])
                until(lambda: [*holder.memory.glob(".spare.*")], "its file is kept")
                assert not copy_of(holder, 1).exists()
        assert numbers[2] == numbers[0]
        assert not [*holder.memory.glob(".spare.*")]
        assert len(files(holder.memory)) == 2
        assert holder.ask("problems") == []
        if retires == 0:  # otherwise the owner may have asked meanwhile, and noticed that a copy is gone
            assert owner.ask("problems") == []


def test_only_what_moves_bytes_has_a_low_priority_within_the_session_of_the_trainer(tmp_path: Path):
    with half_sent(tmp_path, patience=30.0) as (owner, holder, *_):
        for rank in (owner, holder):
            threads = Path(f"/proc/{rank.copying}/task").glob("*/stat")
            niceness = [int(each.read_text().rpartition(")")[2].split()[16]) for each in threads]
            assert niceness.count(15) == 2
            assert os.getpriority(os.PRIO_PROCESS, rank.copying) < 15
            assert os.getsid(rank.copying) == os.getsid(rank.process.pid)
            assert os.getpgid(rank.copying) == rank.copying


def test_any_number_of_ranks_on_uneven_hosts_copy_to_each_other_at_once(tmp_path: Path):
    hosts = "aaabc"
    with ranks(tmp_path, TOKEN, hosts) as job:
        paths = [seal(each.memory, each.rank, 7, 6 << 20, world_size=5) for each in job]
        for each, path in zip(job, paths, strict=True):
            each.ask("send", str(path))
        for each in job:
            until(lambda each=each: each.held() == [7], f"rank {each.rank} has a copy")
        for rank, holder in replica_holders(hosts).items():
            assert holder is not None
            copy = path_of(tmp_path / hosts[holder], identity(rank, 7, 5), holder)
            assert copy.read_bytes() == paths[rank].read_bytes()


def test_a_single_host_copies_nothing_without_an_error(tmp_path: Path):
    with ranks(tmp_path, TOKEN, "aa") as (first, _):
        first.ask("send", str(seal(first.memory, 0, 1)))
        first.ask("retire", [[1, 0]])
        assert first.held() == []
        assert first.ask("problems") == []


def test_a_holder_killed_in_the_middle_leaves_no_copy_and_the_next_one_succeeds(tmp_path: Path):
    with half_sent(tmp_path) as (owner, holder, wire, _):
        holder.signal(signal.SIGKILL)
        wire.close()
        assert not list(holder.memory.rglob("*.shard"))
        until_it_says(owner, "step 1 of rank 0 has no copy at rank 1")
        assert owner.held() == []
        restarted = Rank(1, holder.memory, TOKEN)
        try:
            for each in (owner, restarted):
                each.ask("connect", [owner.address, restarted.address], ["a", "b"])
            assert copied(owner, 2, LARGE).read_bytes() == copy_of(holder, 2).read_bytes()
        finally:
            restarted.end()


def test_a_stopped_holder_is_reported_in_time_and_continues_after_sigcont(tmp_path: Path):
    with half_sent(tmp_path) as (owner, holder, wire, _):
        holder.signal(signal.SIGSTOP)
        wire.released.set()
        until_it_says(owner, "did not answer for 1 s")
        for step in (2, 3):
            owner.ask("send", str(seal(owner.memory, 0, step, LARGE)))
        until_it_says(owner, "could not be reached")
        assert not list(holder.memory.rglob("*.shard"))
        assert owner.held() == []
        holder.signal(signal.SIGCONT)
        until(lambda: 3 in owner.held(), "the newest has a copy")
        wire.close()
        assert verify(copy_of(holder, 3)).whole
        # One that its owner has given up may be complete after all; it goes when its generation is retired.
        until(lambda: not any(name.startswith(".") for name in files(holder.memory)), "nothing unfinished")
        owner.ask("retire", [[1, 0], [2, 0]])
        until(lambda: len(files(holder.memory)) == 1, "of the others nothing is left")


def test_a_dead_owner_leaves_no_unfinished_files_at_its_holder(tmp_path: Path):
    with half_sent(tmp_path) as (owner, holder, *_):
        assert files(holder.memory) != []
        owner.signal(signal.SIGKILL)
        until(lambda: files(holder.memory) == [], "what it had sent is dropped")


def test_a_bit_that_flips_in_transit_is_detected_and_the_shard_sent_again(tmp_path: Path):
    with ranks(tmp_path, TOKEN, "ab") as (owner, holder):
        wire = Wire(holder.address, flip_at=10 << 20)
        owner.ask("connect", [owner.address, wire.address], ["a", "b"])
        path = copied(owner, 1, LARGE)
        assert wire.flipped
        assert "no copy at rank 1" in " ".join(owner.ask("problems"))
        assert copy_of(holder, 1).read_bytes() == path.read_bytes()
        wire.close()


def test_a_shard_damaged_at_its_source_is_refused_and_given_up(tmp_path: Path):
    with ranks(tmp_path, TOKEN, "ab") as (owner, holder):
        path = seal(owner.memory, 0, 1)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)
        owner.ask("send", str(path))
        until_it_says(owner, "refused 3 times")
        assert "tensor 'b' is damaged" in " ".join(holder.ask("problems"))
        assert files(holder.memory) == []
        copied(owner, 2)


def test_a_peer_without_the_token_is_refused(tmp_path: Path):
    with ranks(tmp_path, TOKEN, "ab") as (owner, holder):
        stranger = Rank(0, tmp_path / "stranger", new_token())
        try:
            stranger.ask("connect", [owner.address, holder.address], ["a", "b"])
            stranger.ask("send", str(seal(stranger.memory, 0, 5)))
            until_it_says(stranger, "could not be reached")
            assert stranger.held() == []
        finally:
            stranger.end()
        assert files(holder.memory) == []
        copied(owner, 1)


def test_retired_copies_are_deleted_at_the_holder(tmp_path: Path):
    """Each rank's own snapshots stay: their memory is used again."""
    with ranks(tmp_path, TOKEN, "ab") as (owner, holder):
        for step in (1, 2):
            copied(owner, step)
        seal(holder.memory, 1, 1)
        owner.ask("retire", [[1, 0]])
        until(lambda: len(files(holder.memory)) == 2, "its copy is gone, and what is the holder's own stays")
        assert owner.held() == [2]
        assert files(owner.memory) == ["rank-0-of-2.held-by-0.shard"] * 2


def test_a_holder_that_was_away_deletes_retired_shards_later(tmp_path: Path):
    with ranks(tmp_path, TOKEN, "ab") as (owner, holder):
        copied(owner, 1)
        holder.signal(signal.SIGSTOP)
        owner.ask("retire", [[1, 0]])
        until_it_says(owner, "does not answer")
        holder.signal(signal.SIGKILL)
        assert files(holder.memory) != []
        restarted = Rank(1, holder.memory, TOKEN, port=holder.address[1])
        try:
            until(lambda: files(holder.memory) == [], "and gone there")
        finally:
            restarted.end()


def test_a_holder_that_lost_its_memory_gets_the_newest_again(tmp_path: Path):
    with ranks(tmp_path, TOKEN, "ab") as (owner, holder):
        for step in (1, 2):
            copied(owner, step)
        for path in holder.memory.rglob("*.shard"):
            path.unlink()
        until_it_says(owner, "lost its copies of step 1, step 2")
        until(lambda: owner.held() == [2], "the newest is there again")
        assert verify(copy_of(holder, 2)).whole


def test_a_copy_that_is_there_already_is_replaced_by_a_whole_one(tmp_path: Path):
    with ranks(tmp_path, TOKEN, "ab") as (owner, holder):
        copy = copy_of(holder, 1)
        copy.parent.mkdir(parents=True)
        copy.write_bytes(b"damaged")
        assert copied(owner, 1).read_bytes() == copy.read_bytes()


def test_closing_does_not_wait_for_a_holder_that_hangs(tmp_path: Path):
    with ranks(tmp_path, TOKEN, "ab") as (owner, holder):
        holder.signal(signal.SIGSTOP)
        owner.ask("send", str(seal(owner.memory, 0, 1, LARGE)))
        owner.ask("close")
        owner.ask("close")
        owner.ask("send", "/nowhere")
        assert owner.held() == []
        holder.signal(signal.SIGCONT)


def test_a_path_that_is_not_a_shard_is_reported(tmp_path: Path):
    with ranks(tmp_path, TOKEN, "ab") as (owner, _):
        for path in ("/nowhere/at/all", __file__):
            owner.ask("send", path)
            until_it_says(owner, "cannot copy to rank 1")
        copied(owner, 1)
