"""What an earlier run of any number of ranks has left, found by the ranks of now together."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoint_folders import (
    GATE,
    JOB,
    make_disk,
    make_memory,
    put_ledgers,
    put_shard,
    rewrite,
)
from torchscout.checkpoint import ledger
from torchscout.checkpoint.gate import CheckpointGate, Generation
from torchscout.checkpoint.storage.inventory import Member
from torchscout.session.checkpoints.resharding import previous_of_any_size
from torchscout.session.checkpoints.resumption import PreviousRun


def find(*folders: Sequence[Path]) -> tuple[PreviousRun | None, list[Any]]:
    """What all ranks conclude, each with its own folders, and what each has sent last."""
    barrier = threading.Barrier(len(folders), timeout=30)
    box: list[str] = [""] * len(folders)

    def exchange_of(rank: int) -> Callable[[Any], list[Any]]:
        def exchange(document: Any) -> list[Any]:
            box[rank] = json.dumps(document)
            barrier.wait()
            gathered = [json.loads(each) for each in box]
            barrier.wait()
            return gathered

        return exchange

    def conclude(rank: int) -> PreviousRun | None:
        member = Member(job=JOB, mesh="m", world_size=len(folders), rank=rank)
        return previous_of_any_size(folders[rank], member, exchange_of(rank))

    with ThreadPoolExecutor(len(folders)) as ranks:
        found = list(ranks.map(conclude, range(len(folders))))
    assert all(each == found[0] for each in found)
    return found[0], [json.loads(each) for each in box]


def ranks_read(sent: Sequence[Any]) -> list[list[int]]:
    return [[rank for rank, _, _ in rows] for rows in sent]


def test_ranks_that_share_a_disk_share_the_reading(tmp_path: Path):
    disk = make_disk(tmp_path)
    found, sent = find([disk], [disk], [disk])
    assert found is not None
    assert found.is_whole
    assert found.gate.verified == GATE.verified
    assert ranks_read(sent) == [[0, 3], [1], [2]]


@pytest.mark.parametrize("captured", [range(4), range(3)])
def test_what_was_being_captured_counts_if_every_rank_had_captured_it(tmp_path: Path, captured: range):
    disk = make_disk(tmp_path)
    for rank in captured:
        put_shard(disk, Generation(7), rank)
    found, sent = find([disk], [disk])
    assert [row[2]["pending"] for rows in sent for row in rows] == [[[0, captured[-1]]]] * 4
    assert found is not None
    assert found.gate.latest == (Generation(7) if len(captured) == 4 else Generation(6))


def test_each_machine_reads_its_memory(tmp_path: Path):
    disk, memory = make_disk(tmp_path / "disk"), make_memory(tmp_path / "memory")
    (empty := tmp_path / "empty").mkdir()
    found, sent = find([empty, disk], [memory, disk])
    assert found is not None
    assert found.gate.latest == Generation(7)
    assert ranks_read(sent)[1] == [0, 1, 2, 3], "the memory's, of which the other rank knows nothing"


def test_disks_of_two_machines_with_ledgers_of_the_same_ranks_are_both_read(tmp_path: Path):
    """As a job leaves them whose ranks have changed places: the newer ledger is on either."""
    one = make_disk(tmp_path / "one")
    shutil.copytree(one, two := tmp_path / "two")
    put_ledgers(two, CheckpointGate(recipes=2, lineage=1))
    ledger.write(one, 3, CheckpointGate(recipes=2, lineage=2), job=JOB, world_size=4)
    found, sent = find([one], [two])
    assert ranks_read(sent) == [[0, 1, 2, 3]] * 2
    assert found is not None
    assert found.gate.lineage == 2
    assert not found.is_whole


def test_ledgers_of_other_jobs_and_damaged_ones_do_not_count(tmp_path: Path):
    put_ledgers(tmp_path, job="another")
    rewrite(ledger.path_of(tmp_path, 2), b"{}")
    assert find([tmp_path], [tmp_path])[0] is None


def test_a_ledger_of_which_only_the_previous_one_is_left_is_read_by_all(tmp_path: Path):
    disk = make_disk(tmp_path)
    put_ledgers(disk)  # so that there are previous ones
    ledger.path_of(disk, 0).unlink()
    found, sent = find([disk], [disk])
    assert ranks_read(sent) == [[0, 1, 2, 3]] * 2
    assert found is not None
    assert found.is_whole


def test_a_newer_ledger_of_another_job_does_not_say_how_many_ranks_there_were(tmp_path: Path):
    disk = make_disk(tmp_path / "disk")
    put_ledgers(memory := tmp_path / "memory", CheckpointGate(recipes=2, lineage=5), job="another", of=8)
    found, _ = find([memory, disk])
    assert found is not None
    assert found.is_whole
