"""Dumps of the Flight Recorder -> who holds the job up. The dumps are as NCCL ranks write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.support.flight_recorder import Recorders
from torchscout.decision.flight_recorder import State, read_dump
from torchscout.decision.flight_recorder import Explanation, explain
from torchscout.decision.types import Scope

Documents = Mapping[int, Mapping[str, Any]]
ONE, OTHER = ("1", "one"), ("2", "other")
RANK, GROUP = Scope.RANK, Scope.PROCESS_GROUP
EVERYBODY = (0, 1, 2, 3)


def healthy(
    size: int = 4, *, one: Sequence[int] = (), other: Sequence[int] = (), timed: bool = True
) -> Recorders:
    """``one`` and ``other``: members of more groups."""
    job = Recorders(size, timed=timed)
    for key, members in ((ONE, one), (OTHER, other)):
        if members:
            job.group(*key, members)
    job.collective("broadcast", [3])
    for _ in range(3):
        job.collective()
    return job


def explained(given: Recorders | Documents, size: int = 4) -> Explanation:
    documents = given.documents() if isinstance(given, Recorders) else given
    size = given.size if isinstance(given, Recorders) else size
    return explain([read_dump(rank, document) for rank, document in documents.items()], size)


def named(given: Recorders | Documents, size: int = 4) -> tuple[Scope | None, tuple[int, ...]]:
    incident = explained(given, size).incident
    return (None, ()) if incident is None else (incident.scope, incident.ranks)


def without(job: Recorders, rank: int) -> Documents:
    return {each: document for each, document in job.documents().items() if each != rank}


def test_a_job_whose_operations_are_all_completed_does_not_hang():
    found = explained(healthy())
    assert (found.incident, found.has_hang) == (None, False)


def chain() -> Recorders:
    """Ranks 0 and 1 wait for 2 in the group of all; 3 waits for 1 in theirs."""
    job = healthy(one=[1, 3], timed=False).collective(group=ONE)
    return job.collective(group=ONE, ranks=[3], state="scheduled").collective(ranks=[0, 1], state="scheduled")


def far_ahead() -> Recorders:
    job = healthy(timed=False)
    for _ in range(20):
        job.collective(ranks=[0, 1, 3], state="scheduled")
    return job


def in_opposite_order(waits: str, queued: str | None) -> Recorders:
    job = healthy(2, one=[0, 1], other=[0, 1], timed=waits == "started")
    job.collective(group=ONE, ranks=[0], state=waits).collective(group=OTHER, ranks=[1], state=waits)
    if queued:
        job.collective(group=OTHER, ranks=[0], state=queued).collective(group=ONE, ranks=[1], state=queued)
    return job


def pipeline(**options: bool) -> Recorders:
    job = healthy(**options)
    for stage in range(3):
        job.send(stage, stage + 1).receive(stage, stage + 1)
    return job


def batches() -> Recorders:
    job = healthy(3)
    return job.batch(0, [("send", 1)]).batch(1, [("recv", 0), ("send", 2)]).batch(2, [("recv", 1)])


def coalesced() -> Recorders:
    """Collectives that are launched together are one operation."""
    job = healthy(3)
    for rank in range(3):
        for number, state in enumerate(("scheduled", "scheduled", "completed")):
            name = "coalesced" if number == 2 else "all_gather_into_tensor_coalesced"
            job.collective(name, [4] if number < 2 else [], ranks=[rank], state=state)
            if number:
                job.entries[rank][-1]["collective_seq_id"] = job.entries[rank][-2]["collective_seq_id"]
        job._collectives[rank, ("0", "default_pg")] -= 2
    return job


def late(**options: bool) -> Recorders:
    state = "started" if options.get("timed", True) else "scheduled"
    return healthy(**options).collective(shape=[5], ranks=[0, 1, 3], state=state)


def other(name: str = "all_reduce", shape: Sequence[int] = (5,), dtype: str = "Float") -> Recorders:
    job = healthy().collective(shape=[5], ranks=[0, 2, 3], state="started")
    return job.collective(name, shape, ranks=[1], state="started", dtype=dtype)


NUMBER = "number 5 of group default_pg"
ROWS = {
    "late": (late(), RANK, (2,), ["all_reduce float32[5]", NUMBER, "number 4", "3 ranks"]),
    "late, without times": (late(timed=False), RANK, (2,), [NUMBER]),
    "hosts run ahead": (far_ahead(), RANK, (2,), [NUMBER]),
    "late, behind victims in other groups": (chain(), RANK, (2,), []),
    "another operation": (other("all_gather"), RANK, (1,), ["all_gather float32[5]", NUMBER]),
    "another shape": (other(shape=[6]), RANK, (1,), ["all_reduce float32[6]", NUMBER]),
    "another dtype": (other(dtype="BFloat16"), RANK, (1,), []),
    "as many elements in another shape": (
        healthy()
        .collective(shape=[2, 8], ranks=[0, 1])
        .collective(shape=[16], ranks=[2, 3])
        .collective(ranks=[0, 1, 2], state="started"),
        RANK,
        (3,),
        [],
    ),
    "two differ": (
        healthy(2).collective(shape=[5], ranks=[0], state="started").collective(shape=[6], ranks=[1]),
        GROUP,
        (0, 1),
        ["no majority"],
    ),
    "all have entered and nobody returns": (
        healthy(one=[0, 1]).collective(group=ONE, state="started").collective(group=ONE, state="scheduled"),
        GROUP,
        (0, 1),
        ["All 2 members", "number 1 of group one", "No rank is behind"],
    ),
    "opposite order": (in_opposite_order("scheduled", None), GROUP, (0, 1), ["wait for each other"]),
    "opposite order on devices": (
        in_opposite_order("started", "scheduled"),
        GROUP,
        (0, 1),
        ["wait for each other"],
    ),
    "a device is stuck in another kernel": (
        healthy().collective(ranks=[0, 1, 3], state="started").collective(ranks=[2], state="scheduled"),
        RANK,
        (2,),
        ["its host has issued", "number 5", "device has not begun"],
    ),
    "without times nothing is known of devices": (
        healthy(timed=False).collective(state="scheduled"),
        GROUP,
        EVERYBODY,
        [],
    ),
    "no device has begun": (healthy().collective(state="scheduled"), GROUP, EVERYBODY, []),
    "a root that completed early": (
        healthy()
        .collective("broadcast", [7], ranks=[0])
        .collective("broadcast", [7], ranks=[1, 3], state="started"),
        RANK,
        (2,),
        [],
    ),
    "no dump where others wait": (
        without(healthy().collective(ranks=[0, 1, 3], state="started"), 2),
        GROUP,
        EVERYBODY,
        ["Rank 2 left no readable dump"],
    ),
    "no dump, and another one explains it": (
        without(healthy().collective(ranks=[0, 1], state="started"), 3),
        RANK,
        (2,),
        ["Rank 3 left no readable dump"],
    ),
    "transfers that match": (pipeline(), None, (), []),
    "a receive without its send": (
        pipeline().receive(1, 2, state="started"),
        RANK,
        (1,),
        ["recv float32[8] number 2 of 1 -> 2"],
    ),
    "a chain of transfers": (
        pipeline(timed=False)
        .receive(0, 1, state="scheduled")
        .receive(1, 2, state="scheduled")
        .receive(2, 3, state="scheduled"),
        RANK,
        (0,),
        [],
    ),
    "transfers of other sizes": (
        pipeline().send(1, 2, state="started", shape=[8]).receive(1, 2, state="started", shape=[16]),
        GROUP,
        (1, 2),
        [],
    ),
    "stages that receive from each other": (
        pipeline().receive(1, 0, state="started").receive(0, 1, state="started"),
        GROUP,
        (0, 1),
        ["wait for each other"],
    ),
    "batches that match": (batches(), None, (), []),
    "batches have the state of their launch": (
        batches()
        .batch(1, [("recv", 0), ("send", 2)], state="started")
        .batch(2, [("recv", 1)], state="started"),
        RANK,
        (0,),
        [],
    ),
    "collectives launched together": (coalesced(), None, (), []),
    "late after some that were launched together": (
        coalesced().collective(ranks=[0, 1], state="started"),
        RANK,
        (2,),
        [],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_who_is_named(name: str):
    given, scope, ranks, facts = ROWS[name]
    assert named(given) == (scope, ranks)
    sentence = explained(given).sentence
    assert [each for each in facts if each not in sentence] == [], sentence


def test_a_rank_without_a_dump_that_nobody_waits_for_leaves_it_undecided():
    found = explained(without(healthy(), 3))
    assert (found.incident, found.has_hang) == (None, None)
    assert "rank 3" in found.sentence




def full_buffer(job: Recorders, kept: Mapping[int, int]) -> Documents:
    documents = job.documents()
    for rank, count in kept.items():
        documents[rank]["entries"] = documents[rank]["entries"][-count:]
    return documents


def long_run(job: Recorders) -> Recorders:
    for _ in range(50):
        job.collective()
    return job


def test_entries_that_a_full_buffer_has_lost():
    job = long_run(healthy()).collective(shape=[5], ranks=[0, 1, 3], state="started")
    kept = {0: 10, 1: 9, 2: 7, 3: 20}
    assert named(full_buffer(job, kept)) == (RANK, (2,))
    job.collective(shape=[6], ranks=[2], state="started")
    for each in (kept, dict.fromkeys(range(4), 1)):
        assert named(full_buffer(job, each)) == (RANK, (2,))
        assert "float32[6] as number 55" in explained(full_buffer(job, each)).sentence


def test_transfers_of_full_buffers_are_counted_from_the_last_that_completed():
    job = healthy()
    for _ in range(40):
        job.send(0, 1).receive(0, 1)
    assert named(full_buffer(job, {0: 5, 1: 30})) == (None, ())
    job.receive(0, 1, state="started")
    assert named(full_buffer(job, {0: 5, 1: 30})) == (RANK, (0,))


def only_active(job: Recorders) -> Documents:
    documents = job.documents()
    for document in documents.values():
        document["entries"] = [each for each in document["entries"] if each["state"] != "completed"]
    return documents


def test_dumps_of_open_operations_only():
    """What rank 0 has completed is left out, but its ``pg_status`` tells that it has issued the broadcast."""
    job = healthy(timed=False).collective("broadcast", ranks=[0])
    job.collective("broadcast", ranks=[1, 3], state="scheduled")
    assert named(only_active(job)) == (RANK, (2,))
    assert named(only_active(job.collective(ranks=[0], state="scheduled"))) == (RANK, (2,))


def test_batched_transfers_in_dumps_of_open_operations_only():
    """The launch of the first batch has completed and is left out; its parts still look scheduled."""
    job = batches().collective()
    assert named(only_active(job), 3) == (None, ())
    assert named(only_active(job.batch(1, [("recv", 0)], state="started")), 3) == (RANK, (0,))


def test_groups_of_one_name_elsewhere_in_the_job_are_apart():
    """As ``split_group`` makes them."""
    documents = dict(Recorders(4).collective().documents())
    for ranks in ([0, 1], [2, 3]):
        half = Recorders(4)
        group = half.group("7", "half", ranks)
        half.collective()
        half.collective(
            group=group, ranks=ranks if 0 in ranks else [2], state="started" if 2 in ranks else "completed"
        )
        documents |= {rank: half.document(rank) for rank in ranks}
    assert named(documents) == (RANK, (3,))


def test_dumps_without_any_operation():
    found = explained({rank: {"entries": [], "pg_config": {}} for rank in range(2)}, 2)
    assert found.has_hang is None


def damaged(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = healthy().document(0)
    change(document["entries"][1])
    return document


@pytest.mark.parametrize(
    "change",
    [
        {"profiling_name": None},
        {"state": "melted"},
        {"collective_seq_id": "five"},
        {"collective_seq_id": 1 << 40},
        {"process_group": "default"},
        {"input_sizes": [["a"]]},
        {"input_sizes": [[-1]]},
        {"frames": [{"name": 3}]},
        {"profiling_name": ["nccl:all_reduce"]},
    ],
)
def test_an_entry_that_is_not_understood_is_counted_and_left_out(change: dict[str, Any]):
    dump = read_dump(0, damaged(lambda entry: entry.update(change)))
    assert (dump.unreadable, len(dump.entries)) == (1, 3)
    without_a_name = read_dump(0, damaged(lambda entry: entry.pop("profiling_name")))
    assert without_a_name.unreadable == 1


def test_a_file_that_is_not_a_dump_is_refused():
    for document in ([], "text", {}, {"a": 1}, {"entries": 3}, {"entries": "abc"}, {"entries": [1]}):
        with pytest.raises(ValueError, match=r"dump|entries"):
            read_dump(0, document)


def test_text_cannot_reach_the_terminal_as_anything_else():
    dump = read_dump(0, damaged(lambda entry: entry.update(profiling_name="nccl:\x1b[2Jall_reduce")))
    assert dump.entries[1].operation == "?[2Jall_reduce"


def test_an_older_format_has_one_sequence_number():
    document = healthy().document(0)
    for entry in document["entries"]:
        entry["seq_id"] = entry.pop("collective_seq_id")
        del entry["is_p2p"], entry["p2p_seq_id"], entry["input_dtypes"], entry["output_dtypes"]
    dump = read_dump(0, document)
    assert [each.sequence for each in dump.entries] == [1, 2, 3, 4]
    assert {each.state for each in dump.entries} == {State.COMPLETED}
