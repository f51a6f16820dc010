"""How state is brought to real ranks: what is read, sent and repaired, and what a rank in trouble does.

Machines are folders. Which generation is loaded, and from where, is in ``scenarios/test_retrieval``.
"""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.replica_ranks import files, identity, seal
from torchscout.checkpoint.gate import Generation, TrustLevel
from torchscout.checkpoint.replication.placement import replica_holders
from torchscout.checkpoint.resume.fetch import fetch
from torchscout.checkpoint.resume.plan import Listing
from torchscout.checkpoint.resume.transfer import Links
from torchscout.checkpoint.storage import shards
from torchscout.checkpoint.storage.inventory import Member, Tier, inventory
from torchscout.checkpoint.storage.shard_format import ShardIdentity, encode
from torchscout.checkpoint.storage.shards import inspect, path_of, verify, write
from torchscout.communicators import Communicators
from torchscout.errors import ChannelError, CheckpointError, DamagedError

SIZE = 9 << 20
"""More than two pieces."""
WANTED = (Generation(8), Generation(6))
TIERS = ("memory", "disk")


def place(folder: Path, hosts: str, rank: int, step: int, tier: str, holder: int) -> Path:
    return path_of(folder / hosts[holder] / tier, identity(rank, step, len(hosts)), holder)


def furnish(
    folder: Path,
    hosts: str,
    steps: Sequence[int] = (8, 6),
    size: int = 1000,
    *,
    replicated: bool = False,
    holders: dict[int, int | None] | None = None,
) -> dict[tuple, bytes]:
    """Every rank's state of these steps in all four places; what it is, by rank and step.

    If ``replicated``, all ranks have the same tensor ``a``; tensor ``b`` is always a rank's own.
    """
    made = {}
    first = {step: os.urandom(size) if replicated else None for step in steps}
    for rank, holder in (holders or replica_holders(hosts)).items():
        for step in steps:
            path = seal(folder / "made", rank, step, size, len(hosts), first[step])
            made[rank, step] = path.read_bytes()
            for tier in TIERS:
                for keeper in {rank, holder} - {None}:
                    copy = place(folder, hosts, rank, step, tier, keeper)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(made[rank, step])
    return made


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def flip_in(path: Path, tensor: str) -> None:
    (entry,) = (each for each in inspect(path).entries if each.name == tensor)
    data = bytearray(path.read_bytes())
    data[entry.offset + entry.length // 2] ^= 1
    path.write_bytes(data)


def connected(patience: float) -> Links:
    group = dist.new_group(timeout=datetime.timedelta(seconds=patience))
    return Links(Communicators(patience).exchange, group)


def recover(rank: int, folder: Path, hosts: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a rank of a job that starts again does; ``options["rank_1"]`` are that rank's own."""
    options = {**options, **options.get(f"rank_{rank}", {})}
    links = connected(options.get("patience", 30))
    member = Member(job="job", mesh=options.get("mesh", "replica=2"), world_size=len(hosts), rank=rank)
    opened: list[Path] = []

    def load(path: Path) -> bytes:
        opened.append(path)
        if not (report := verify(path)).whole:
            raise DamagedError(f"{path}: {report.problems}")
        return path.read_bytes()

    folders = (folder / hosts[rank] / "memory", folder / hosts[rank] / "disk")
    try:
        fetched = fetch(member, options.get("wanted", WANTED), folders, links, load)
    except (CheckpointError, ChannelError) as error:
        return {"error": str(error)}
    return {
        "step": fetched.plan.generation.step,
        "value": fetched.value,
        "path": fetched.path,
        "source": fetched.plan.sources[rank],
        "demoted": fetched.demoted,
        "reason": fetched.plan.reason,
        "opened": opened,
    }


def recovered(folder: Path, hosts: str, **options: Any) -> list[dict[str, Any]]:
    return run_ranks(recover, len(hosts), folder, hosts, options)


def check(answers: list[dict[str, Any]], made: dict[tuple, bytes], step: int) -> None:
    """All ranks have their own state of this step, and got the same messages."""
    for rank, answer in enumerate(answers):
        assert answer.get("step") == step, answer
        assert answer["value"] == made[rank, step]
    assert len({(answer["demoted"], answer["reason"]) for answer in answers}) == 1


def unfinished(folder: Path) -> list[str]:
    return [name for name in files(folder) if name.startswith(".")]


def read_headers(rank: int, folder: Path, hosts: str) -> tuple[dict[str, Any], set[int]]:
    """Fetch, and return also the ranks whose shards this one has read the headers of."""
    read: set[int] = set()

    def inspected(path: Path) -> Any:
        header = inspect(path)
        read.add(header.identity.rank)
        return header

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "inspect", inspected)
        return recover(rank, folder, hosts, {}), read


def test_ranks_read_no_shards_of_others_that_are_not_missing(tmp_path: Path):
    """Where all share a disk, its shards are as many as the ranks."""
    made = furnish(tmp_path, "aaa")
    answers = run_ranks(read_headers, 3, tmp_path, "aaa")
    check([answer for answer, _ in answers], made, 8)
    assert [read for _, read in answers] == [{0}, {1}, {2}]
    for tier in TIERS:
        place(tmp_path, "aaa", 1, 8, tier, 1).unlink()
    answers = run_ranks(read_headers, 3, tmp_path, "aaa")
    assert [(answer["step"], read) for answer, read in answers] == [(6, {0}), (6, {1}), (6, {2})]


def test_ranks_read_the_shards_of_a_machine_that_was_replaced(tmp_path: Path):
    made = furnish(tmp_path, "aab")
    shutil.rmtree(tmp_path / "b")
    answers = run_ranks(read_headers, 3, tmp_path, "aab")
    check([answer for answer, _ in answers], made, 8)
    assert [read for _, read in answers] == [{0, 2}, {1, 2}, set()]


def test_a_copy_is_found_although_shards_of_another_job_are_there(tmp_path: Path):
    made = furnish(tmp_path, "ab")
    stranger = ShardIdentity(job="job", mesh="replica=3", world_size=3, rank=0, generation=Generation(8))
    write(path_of(tmp_path / "a" / "disk", stranger, 0), encode(stranger, TrustLevel.LATEST, None, []))
    shutil.rmtree(tmp_path / "b")
    check(recovered(tmp_path, "ab", wanted=[Generation(8)]), made, 8)


@pytest.mark.slow_cases("abcd")
@pytest.mark.parametrize("hosts", ["ab", "aab", "abcd"])
def test_a_replaced_machine_gets_its_state_back_bit_by_bit(tmp_path: Path, hosts: str):
    made = furnish(tmp_path, hosts, size=SIZE)
    shutil.rmtree(tmp_path / "b")
    answers = recovered(tmp_path, hosts)
    check(answers, made, 8)
    for rank in (rank for rank, host in enumerate(hosts) if host == "b"):
        holder, own = replica_holders(hosts)[rank], place(tmp_path, hosts, rank, 8, "memory", rank)
        assert own.read_bytes() == made[rank, 8]
        assert (answers[rank]["path"], answers[rank]["source"]) == (own, (holder, Tier.MEMORY, holder))
    assert not unfinished(tmp_path)


def test_what_is_damaged_on_the_way_to_a_whole_copy_is_named_once_and_replaced(tmp_path: Path):
    made = furnish(tmp_path, "ab", size=SIZE)
    for tier, holder in (("memory", 1), ("disk", 1), ("memory", 0)):
        flip(place(tmp_path, "ab", 1, 8, tier, holder))
    answers = recovered(tmp_path, "ab")
    check(answers, made, 8)
    assert answers[0]["opened"] == [place(tmp_path, "ab", 0, 8, "memory", 0)], "nothing is read twice"
    assert answers[1]["source"] == (0, Tier.DISK, 0)
    assert len(answers[0]["demoted"]) == 3
    for words in ("its own memory", "its own disk", "rank 0's memory"):
        assert sum(words in each and "rank 1's state" in each for each in answers[0]["demoted"]) == 1
    assert verify(place(tmp_path, "ab", 1, 8, "memory", 1)).whole, "what came stands in for what was damaged"
    assert not unfinished(tmp_path)


def test_copies_that_an_earlier_version_placed_in_a_ring_are_found(tmp_path: Path):
    hosts = "abcd"
    ring = {rank: (rank + 1) % 4 for rank in range(4)}
    assert ring != replica_holders(hosts)
    made = furnish(tmp_path, hosts, holders=ring)
    shutil.rmtree(tmp_path / "b")
    answers = recovered(tmp_path, hosts)
    check(answers, made, 8)
    assert answers[1]["source"] == (2, Tier.MEMORY, 2)


def everywhere(folder: Path, hosts: str, rank: int) -> list[Path]:
    """All copies of this rank's state of step 8."""
    return [
        place(folder, hosts, rank, 8, tier, holder)
        for tier in TIERS
        for holder in {rank, replica_holders(hosts)[rank]} - {None}
    ]


def test_two_ranks_with_the_same_damage_are_repaired_by_a_third(tmp_path: Path):
    made = furnish(tmp_path, "aaa", size=SIZE, replicated=True)
    for rank in (0, 1):
        for path in everywhere(tmp_path, "aaa", rank):
            flip_in(path, "a")
    answers = recovered(tmp_path, "aaa")
    check(answers, made, 8)
    assert sum("identical bytes from rank 2" in each for each in answers[2]["demoted"]) == 2
    assert sum("is damaged: " in each for each in answers[2]["demoted"]) == 4
    assert not unfinished(tmp_path)


def test_a_rank_that_cannot_write_the_repaired_shard_takes_the_older_one(tmp_path: Path):
    made = furnish(tmp_path, "ab", replicated=True)
    shutil.rmtree(tmp_path / "b" / "memory")
    (tmp_path / "b" / "memory").write_bytes(b"a file where a folder should be")
    for path in everywhere(tmp_path, "ab", 1):
        if "b/memory" not in str(path):
            flip_in(path, "a") if path.parts[-4] == "b" else path.unlink()
    answers = recovered(tmp_path, "ab")
    check(answers, made, 6)
    assert "rank 1's state at step 8 could not be repaired: cannot write" in " ".join(answers[0]["demoted"])


def test_ranks_that_want_different_generations_get_an_error(tmp_path: Path):
    furnish(tmp_path, "ab")
    (error,) = {answer["error"] for answer in recovered(tmp_path, "ab", rank_1={"wanted": WANTED[:1]})}
    for said in ("rank 0", "[[8, 0], [6, 0]]", "rank 1", "[[8, 0]]"):
        assert said in error


def test_ranks_of_one_machine_look_at_a_damaged_file_once_each_and_send_it_once(tmp_path: Path):
    """Ranks 2 to 4 see the same memory: what rank 2 sent and was damaged is not asked of ranks 3 and 4."""
    hosts = "aabbb"
    made = furnish(tmp_path, hosts)
    holder = replica_holders(hosts)[0]
    assert hosts[holder] == "b"
    shutil.rmtree(tmp_path / "a")
    flip(place(tmp_path, hosts, 0, 8, "memory", holder))
    answers = recovered(tmp_path, hosts)
    check(answers, made, 8)
    assert answers[0]["source"] == (holder, Tier.DISK, holder)
    assert len(answers[0]["demoted"]) == 1


def test_a_rank_without_memory_is_an_error_on_all_ranks_and_not_damage(tmp_path: Path):
    furnish(tmp_path, "ab", size=SIZE)
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "memory").write_bytes(b"a file where a folder should be")
    (error,) = {answer["error"] for answer in recovered(tmp_path, "ab")}
    assert "step 8 cannot be loaded. rank 1: cannot write" in error


def hang(rank: int, folder: Path, hosts: str) -> str:
    """Rank 1 agrees, and then neither gives nor takes."""
    if rank == 0:
        return recover(rank, folder, hosts, {"patience": 2})["error"]
    links = connected(2)
    member = Member(job="job", mesh="replica=2", world_size=2, rank=1)
    stock = inventory(folder / "b" / "memory", folder / "b" / "disk")
    purpose = ["job", "replica=2", 2, [[8, 0], [6, 0]]]
    for _ in range(1 if stock.found else 2):  # rank 0 looks for missing shards of this rank
        links.exchange([])
        links.exchange({"purpose": purpose, "listing": Listing.of(stock, member, WANTED).to_json()})
    return ""


@pytest.mark.long_cases("b-sending a shard to")
@pytest.mark.parametrize(("empty", "words"), [("a", "receiving a shard from"), ("b", "sending a shard to")])
def test_a_rank_that_hangs_is_an_error_and_no_endless_wait(tmp_path: Path, empty: str, words: str):
    furnish(tmp_path, "ab", size=SIZE)
    shutil.rmtree(tmp_path / empty)
    answers = run_ranks(hang, 2, tmp_path, "ab")
    assert f"{words} rank 1 failed" in answers[0]
    assert not unfinished(tmp_path)
