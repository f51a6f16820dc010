"""Dumps of the Flight Recorder -> who holds the job up. The dumps are as NCCL ranks write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.flight_recorder import Recorders
from torchscout.decision.flight_recorder import Explanation, State, explain, read_dump
from torchscout.decision.types import Scope

Documents = Mapping[int, Mapping[str, Any]]
ONE, OTHER = ("1", "one"), ("2", "other")
RANK, GROUP = Scope.RANK, Scope.PROCESS_GROUP


def healthy(size: int = 4, *, timed: bool = True, steps: int = 3) -> Recorders:
    job = Recorders(size, timed=timed).collective("broadcast", [3])
    for _ in range(steps):
        job.collective()
    return job


def late(*, timed: bool = True, steps: int = 3) -> Recorders:
    state = "started" if timed else "scheduled"
    return healthy(timed=timed, steps=steps).collective(shape=[5], ranks=[0, 1, 3], state=state)


def chain() -> Recorders:
    """Ranks 0 and 1 wait for 2 in the group of all; 3 waits for 1 in theirs."""
    job = healthy(timed=False)
    job.collective(group=job.group(*ONE, [1, 3]))
    return job.collective(group=ONE, ranks=[3], state="scheduled").collective(ranks=[0, 1], state="scheduled")


def far_ahead() -> Recorders:
    job = healthy(timed=False)
    for _ in range(20):
        job.collective(ranks=[0, 1, 3], state="scheduled")
    return job


def differing(name: str = "all_reduce", shape: Sequence[int] = (5,), dtype: str = "Float") -> Recorders:
    job = healthy().collective(shape=[5], ranks=[0, 2, 3], state="started")
    return job.collective(name, shape, ranks=[1], state="started", dtype=dtype)


def other_size() -> Recorders:
    return late(steps=50).collective(shape=[6], ranks=[2], state="started")


def in_opposite_order(waits: str, queued: str | None) -> Recorders:
    job = healthy(2, timed=waits == "started")
    one, other = job.group(*ONE, [0, 1]), job.group(*OTHER, [0, 1])
    job.collective(group=one, ranks=[0], state=waits).collective(group=other, ranks=[1], state=waits)
    if queued:
        job.collective(group=other, ranks=[0], state=queued).collective(group=one, ranks=[1], state=queued)
    return job


def stalled() -> Recorders:
    job = healthy()
    return job.collective(group=job.group(*ONE, [0, 1]), state="started")


def root_completed_early() -> Recorders:
    job = healthy(timed=False).collective("broadcast", ranks=[0])
    return job.collective("broadcast", ranks=[1, 3], state="scheduled")


def pipeline(*, timed: bool = True, transfers: int = 1) -> Recorders:
    job = healthy(timed=timed)
    for stage in [0, 1, 2] * transfers:
        job.send(stage, stage + 1).receive(stage, stage + 1)
    return job


def receiving_chain() -> Recorders:
    job = pipeline(timed=False)
    for stage in range(3):
        job.receive(stage, stage + 1, state="scheduled")
    return job


def batches() -> Recorders:
    job = healthy(3)
    return job.batch(0, [("send", 1)]).batch(1, [("recv", 0), ("send", 2)]).batch(2, [("recv", 1)])


def batches_that_wait() -> Recorders:
    job = batches().batch(1, [("recv", 0), ("send", 2)], state="started")
    return job.batch(2, [("recv", 1)], state="started")


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


def reshaped() -> Recorders:
    """As many elements in another shape are the same to every backend."""
    job = healthy().collective(shape=[2, 8], ranks=[0, 1]).collective(shape=[16], ranks=[2, 3])
    return job.collective(ranks=[0, 1, 2], state="started")


def without(job: Recorders, *ranks: int) -> Documents:
    return {each: document for each, document in job.documents().items() if each not in ranks}


def full_buffers(job: Recorders, *kept: int) -> Documents:
    """The last entries of each rank, that many of them."""
    documents = job.documents()
    for rank, count in enumerate(kept):
        documents[rank]["entries"] = documents[rank]["entries"][-count:]
    return documents


def only_active(job: Recorders) -> Documents:
    documents = job.documents()
    for document in documents.values():
        document["entries"] = [each for each in document["entries"] if each["state"] != "completed"]
    return documents


def halves() -> Documents:
    """Groups of one name elsewhere in the job, as ``split_group`` makes them."""
    documents = dict(Recorders(4).collective().documents())
    for ranks in ([0, 1], [2, 3]):
        half = Recorders(4)
        group = half.group("7", "half", ranks)
        half.collective()
        inside, state = (ranks, "completed") if 0 in ranks else ([2], "started")
        half.collective(group=group, ranks=inside, state=state)
        documents |= {rank: half.document(rank) for rank in ranks}
    return documents


def rare_group(rank: int) -> Documents:
    """All have used a group long ago; what ``rank`` shows of it has fallen out of its buffer."""
    job = healthy()
    job.collective("broadcast", group=job.group(*ONE, [0, 1, 2, 3]))
    for _ in range(9):
        job.collective()
    job.collective(ranks=[0, 1, 3], state="started")
    return full_buffers(job, *(5 if each == rank else 20 for each in range(4)))


def unreadable() -> Documents:
    documents = late().documents()
    documents[2]["entries"][1]["state"] = "melted"
    return documents


def outdated() -> Recorders:
    """Rank 2 was dumped before the others; it has entered what they have completed."""
    return healthy().collective(ranks=[0, 1, 3])


NUMBER = "number 5 of group default_pg"
ALL = (0, 1, 2, 3)
ROWS: dict[str, tuple[Recorders | Documents, Scope | None, Sequence[int], Sequence[str]]] = {
    "late": (late(), RANK, [2], ["all_reduce float32[5]", NUMBER, "number 4", "3 ranks"]),
    "late, without times": (late(timed=False), RANK, [2], [NUMBER]),
    "hosts run ahead": (far_ahead(), RANK, [2], [NUMBER]),
    "late, behind victims in other groups": (chain(), RANK, [2], []),
    "groups of one name": (halves(), RANK, [3], ["group half of ranks 2 and 3"]),
    "another operation": (differing("all_gather"), RANK, [1], ["all_gather float32[5]", NUMBER]),
    "another size": (differing(shape=[6]), RANK, [1], ["all_reduce float32[6]", NUMBER]),
    "another dtype": (differing(dtype="BFloat16"), RANK, [1], ["bfloat16[5]"]),
    "another shape is no difference": (reshaped(), RANK, [3], ["number 6"]),
    "two differ": (
        healthy(2).collective(shape=[5], ranks=[0], state="started").collective(shape=[6], ranks=[1]),
        GROUP,
        [0, 1],
        ["no majority"],
    ),
    "nobody is behind": (stalled(), GROUP, [0, 1], ["All 2 members", "number 1 of", "No rank is behind"]),
    "opposite order": (in_opposite_order("scheduled", None), GROUP, [0, 1], ["wait for each other"]),
    "opposite order on devices": (in_opposite_order("started", "scheduled"), GROUP, [0, 1], ["each other"]),
    "a device is stuck in another kernel": (
        healthy().collective(ranks=[0, 1, 3], state="started").collective(ranks=[2], state="scheduled"),
        RANK,
        [2],
        ["its host has issued", "number 5", "device has not begun"],
    ),
    "devices are unknown": (healthy(timed=False).collective(state="scheduled"), GROUP, ALL, []),
    "no device has begun": (healthy().collective(state="scheduled"), GROUP, ALL, []),
    "a root that completed early": (root_completed_early(), RANK, [2], []),
    "no dump where others wait": (without(late(), 2), GROUP, ALL, ["Rank 2 left no readable dump"]),
    "no dump, and another one explains it": (
        without(healthy().collective(ranks=[0, 1], state="started"), 3),
        RANK,
        [2],
        ["Rank 3 left no readable dump"],
    ),
    "most dumps are missing": (without(late(), 1, 2, 3), None, [], ["rank cannot be identified"]),
    "transfers that match": (pipeline(), None, [], []),
    "a receive without its send": (
        pipeline().receive(1, 2, state="started"),
        RANK,
        [1],
        ["recv float32[8] number 2 of 1 -> 2"],
    ),
    "a chain of transfers": (receiving_chain(), RANK, [0], []),
    "transfers of other sizes": (
        pipeline().send(1, 2, state="started", shape=[8]).receive(1, 2, state="started", shape=[16]),
        GROUP,
        [1, 2],
        [],
    ),
    "stages that receive from each other": (
        pipeline().receive(1, 0, state="started").receive(0, 1, state="started"),
        GROUP,
        [0, 1],
        ["wait for each other"],
    ),
    "batches that match": (batches(), None, [], []),
    "batches have the state of their launch": (batches_that_wait(), RANK, [0], []),
    "launched together": (coalesced(), None, [], []),
    "late after that": (coalesced().collective(ranks=[0, 1], state="started"), RANK, [2], []),
    "full buffers": (full_buffers(late(steps=50), 10, 9, 7, 20), RANK, [2], ["number 52"]),
    "full buffers, another size": (full_buffers(other_size(), 10, 9, 7, 20), RANK, [2], ["as number 52"]),
    "one entry each, another size": (full_buffers(other_size(), 1, 1, 1, 1), RANK, [2], ["as number 52"]),
    "a group that one buffer has lost": (rare_group(3), RANK, [2], ["number 14 of group default_pg"]),
    "transfers in full buffers": (full_buffers(pipeline(transfers=40), 5, 30), None, [], []),
    "a receive without its send in full buffers": (
        full_buffers(pipeline(transfers=40).receive(0, 1, state="started"), 5, 30),
        RANK,
        [0],
        [],
    ),
    "open operations only": (only_active(late()), RANK, [2], [NUMBER]),
    # Rank 0 or 2 may have completed the broadcast; their dumps do not contain it.
    "a root in open operations only": (only_active(root_completed_early()), GROUP, ALL, ["may lack"]),
    "batches in open operations only": (only_active(batches().collective()), None, [], []),
    "open batches only": (only_active(batches_that_wait()), RANK, [0], []),
    "an entry that cannot be read": (unreadable(), GROUP, ALL, ["Its record may lack operations"]),
    "a dump of an earlier moment": (outdated(), None, [], ["no hang"]),
}


def explained(given: Recorders | Documents) -> Explanation:
    documents = given.documents() if isinstance(given, Recorders) else given
    dumps = [read_dump(rank, document) for rank, document in documents.items()]
    return explain(dumps, dumps[0].world_size or len(dumps))


@pytest.mark.parametrize("name", ROWS)
def test_who_is_named(name: str):
    given, scope, ranks, facts = ROWS[name]
    found = explained(given)
    incident = found.incident
    assert (incident and incident.scope, incident.ranks if incident else ()) == (scope, tuple(ranks))
    assert [each for each in facts if each not in found.sentence] == [], found.sentence


@pytest.mark.parametrize(
    ("given", "has_hang"),
    [
        (healthy(), False),
        (late(), True),
        (without(healthy(), 3), None),
        ({0: {"entries": [], "pg_config": {}}}, None),
    ],
    ids=["all completed", "late", "a dump is missing", "no operations"],
)
def test_whether_there_is_a_hang(given: Recorders | Documents, has_hang: bool | None):
    assert explained(given).has_hang is has_hang


@pytest.mark.parametrize(
    "change",
    [
        {"profiling_name": None},
        {"profiling_name": ["nccl:all_reduce"]},
        {"state": "melted"},
        {"collective_seq_id": "five"},
        {"collective_seq_id": 1 << 40},
        {"process_group": "default"},
        {"input_sizes": [["a"]]},
        {"input_sizes": [[-1]]},
        {"frames": [{"name": 3}]},
    ],
)
def test_an_entry_that_is_not_understood_is_counted_and_left_out(change: dict[str, Any]):
    document = healthy().document(0)
    document["entries"][1] |= change
    dump = read_dump(0, document)
    assert (dump.unreadable, len(dump.entries)) == (1, 3)


@pytest.mark.parametrize(
    "document", [[], "text", {}, {"a": 1}, {"entries": 3}, {"entries": "abc"}, {"entries": [1]}]
)
def test_a_file_that_is_not_a_dump_is_refused(document: object):
    with pytest.raises(ValueError, match=r"dump|entries"):
        read_dump(0, document)


def test_text_cannot_reach_the_terminal_as_anything_else():
    document = healthy().document(0)
    document["entries"][1]["profiling_name"] = "nccl:\x1b[2Jall_reduce"
    assert read_dump(0, document).entries[1].operation == "?[2Jall_reduce"


def test_an_older_format_has_one_sequence_number():
    document = healthy().document(0)
    for entry in document["entries"]:
        entry["seq_id"] = entry.pop("collective_seq_id")
        del entry["is_p2p"], entry["p2p_seq_id"], entry["input_dtypes"], entry["output_dtypes"]
    dump = read_dump(0, document)
    assert [each.sequence for each in dump.entries] == [1, 2, 3, 4]
    assert {each.state for each in dump.entries} == {State.COMPLETED}
