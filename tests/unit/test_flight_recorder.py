"""Dumps of the Flight Recorder -> who holds the job up. The dumps are as NCCL ranks write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.support.flight_recorder import Recorders
from torchscout.decision.hang.flight_recorder import State, read_dump
from torchscout.decision.hang.flight_recorder_diagnosis import Explanation, explain
from torchscout.decision.records.record import Scope

Documents = Mapping[int, Mapping[str, Any]]


def explained(documents: Documents, size: int) -> Explanation:
    return explain([read_dump(rank, document) for rank, document in documents.items()], size)


def named(recorders: Recorders, documents: Documents | None = None) -> tuple[Scope | None, tuple[int, ...]]:
    found = explained(documents or recorders.documents(), recorders.size)
    return (None, ()) if found.incident is None else (found.incident.scope, found.incident.ranks)


def healthy(size: int = 4, **options: bool) -> Recorders:
    job = Recorders(size, **options)
    job.collective("broadcast", [3])
    for _ in range(3):
        job.collective()
    return job


def test_a_job_whose_operations_are_all_completed_does_not_hang():
    found = explained(healthy().documents(), 4)
    assert found.incident is None
    assert found.has_hang is False
    assert "show no hang" in found.sentence


@pytest.mark.parametrize("timed", [True, False])
def test_a_rank_that_has_not_entered_is_named(timed: bool):
    job = healthy(timed=timed)
    job.collective(shape=[5], ranks=[0, 1, 3], state="started" if timed else "scheduled")
    found = explained(job.documents(), 4)
    assert found.incident is not None
    assert found.incident.ranks == (2,)
    assert found.sentence == (
        "Rank 2 has not entered all_reduce float32[5] number 5 of group default_pg; its last operation is "
        "all_reduce float32[1024] number 4 of group default_pg, which is completed. 3 ranks wait for it."
    )


def test_hosts_that_run_ahead_do_not_hide_who_is_late():
    job = healthy(timed=False)
    for _ in range(20):
        job.collective(ranks=[0, 1, 3], state="scheduled")
    found = explained(job.documents(), 4)
    assert found.incident is not None
    assert found.incident.ranks == (2,)
    assert "number 5 of group default_pg" in found.sentence


def test_a_late_rank_is_found_behind_those_that_wait_for_it_in_other_groups():
    """Ranks 0 and 1 wait for 2 in the group of all; 3 waits for 1 in theirs."""
    job = healthy(timed=False)
    pair = job.group("1", "tensor", [1, 3])
    job.collective(group=pair)
    job.collective(group=pair, ranks=[3], state="scheduled")
    job.collective(ranks=[0, 1], state="scheduled")
    assert named(job) == (Scope.RANK, (2,))


@pytest.mark.parametrize(
    ("name", "shape", "dtype"), [("all_gather", [5], "Float"), ("all_reduce", [6], "Float")]
)
def test_a_rank_that_issued_something_else_is_named(name: str, shape: list[int], dtype: str):
    job = healthy()
    job.collective(shape=[5], ranks=[0, 2, 3], state="started")
    job.collective(name, shape, ranks=[1], state="started", dtype=dtype)
    found = explained(job.documents(), 4)
    assert found.incident is not None
    assert (found.incident.scope, found.incident.ranks) == (Scope.RANK, (1,))
    assert f"Rank 1 issued {name} float32{shape}".replace(" [", "[") in found.sentence
    assert "as number 5 of group default_pg" in found.sentence


def test_another_dtype_is_something_else():
    job = healthy()
    job.collective(ranks=[0, 2, 3], state="started")
    job.collective(ranks=[1], state="started", dtype="BFloat16")
    assert named(job) == (Scope.RANK, (1,))


def test_equal_elements_in_another_shape_are_the_same_operation():
    job = healthy()
    job.collective(shape=[2, 8], ranks=[0, 1])
    job.collective(shape=[16], ranks=[2, 3])
    job.collective(ranks=[0, 1, 2], state="started")
    assert named(job) == (Scope.RANK, (3,))


def test_two_members_that_differ_are_both_named_as_a_group():
    job = healthy(2)
    job.collective(shape=[5], ranks=[0], state="started")
    job.collective(shape=[6], ranks=[1], state="started")
    found = explained(job.documents(), 2)
    assert found.incident is not None
    assert (found.incident.scope, found.incident.ranks) == (Scope.PROCESS_GROUP, (0, 1))
    assert "no majority" in found.sentence


def test_all_have_entered_and_nobody_returns():
    job = healthy()
    half = job.group("1", "tensor", [0, 1])
    job.collective(group=half, state="started")
    job.collective(group=half, state="scheduled")
    found = explained(job.documents(), 4)
    assert found.incident is not None
    assert (found.incident.scope, found.incident.ranks) == (Scope.PROCESS_GROUP, (0, 1))
    assert found.sentence == (
        "All 2 members entered all_reduce float32[1024] number 1 of group tensor, which has not returned. "
        "No rank is behind: the runtime, a device or the transport has stalled."
    )


def in_opposite_order(job: Recorders, waits: str, queued: str | None) -> None:
    one, other = job.group("1", "one", [0, 1]), job.group("2", "other", [0, 1])
    job.collective(group=one, ranks=[0], state=waits)
    job.collective(group=other, ranks=[1], state=waits)
    if queued:
        job.collective(group=other, ranks=[0], state=queued)
        job.collective(group=one, ranks=[1], state=queued)


@pytest.mark.parametrize(("waits", "queued"), [("scheduled", None), ("started", "scheduled")])
def test_ranks_that_entered_in_opposite_order(waits: str, queued: str | None):
    """Also where the hosts have issued both, and only the devices have begun in opposite order."""
    job = healthy(2, timed=waits == "started")
    in_opposite_order(job, waits, queued)
    found = explained(job.documents(), 2)
    assert found.incident is not None
    assert (found.incident.scope, found.incident.ranks) == (Scope.PROCESS_GROUP, (0, 1))
    assert (
        "Ranks 0 and 1 wait for each other, having entered operations in different orders or left one out"
        in found.sentence
    )


def test_a_device_that_has_not_begun_what_its_host_has_issued():
    """It is stuck in some other kernel."""
    job = healthy()
    job.collective(ranks=[0, 1, 3], state="started")
    job.collective(ranks=[2], state="scheduled")
    found = explained(job.documents(), 4)
    assert found.incident is not None
    assert (found.incident.scope, found.incident.ranks) == (Scope.RANK, (2,))
    assert "its host has issued all_reduce float32[1024] number 5" in found.sentence
    assert "its device has not begun" in found.sentence


def test_without_recorded_starts_nothing_is_concluded_about_devices():
    job = healthy(timed=False)
    job.collective(state="scheduled")
    assert named(job) == (Scope.PROCESS_GROUP, (0, 1, 2, 3))


def test_devices_that_have_all_begun_nothing_are_stalled_together():
    job = healthy()
    job.collective(state="scheduled")
    assert named(job) == (Scope.PROCESS_GROUP, (0, 1, 2, 3))


def test_a_rank_without_a_dump_is_mentioned_where_others_wait_and_not_named():
    job = healthy()
    job.collective(ranks=[0, 1, 3], state="started")
    documents = {rank: each for rank, each in job.documents().items() if rank != 2}
    found = explained(documents, 4)
    assert found.incident is not None
    assert (found.incident.scope, found.incident.ranks) == (Scope.PROCESS_GROUP, (0, 1, 2, 3))
    assert "Rank 2 left no readable dump: it is not known whether it, the runtime" in found.sentence


def test_a_rank_without_a_dump_is_not_blamed_for_what_another_explains():
    job = healthy()
    job.collective(ranks=[0, 1], state="started")
    documents = {rank: each for rank, each in job.documents().items() if rank != 3}
    found = explained(documents, 4)
    assert found.incident is not None
    assert found.incident.ranks == (2,)
    assert found.sentence.endswith(" Rank 3 left no readable dump.")


def test_a_rank_without_a_dump_that_nobody_waits_for_leaves_it_undecided():
    found = explained({rank: each for rank, each in healthy().documents().items() if rank != 3}, 4)
    assert found.incident is None
    assert found.has_hang is None
    assert "rank 3 left no readable dump" in found.sentence


def test_a_root_that_completed_early_is_not_missed():
    """Broadcast: its source is done before the others have begun."""
    job = healthy()
    job.collective("broadcast", [7], ranks=[0], state="completed")
    job.collective("broadcast", [7], ranks=[1, 3], state="started")
    assert named(job) == (Scope.RANK, (2,))


def test_a_dump_that_is_older_than_the_others_is_known_as_such():
    """Its rank has entered what others have completed."""
    job = healthy()
    job.collective(ranks=[0, 1, 3])
    found = explained(job.documents(), 4)
    assert found.has_hang is False
    assert found.progresses.outdated == {2}


def full_buffer(job: Recorders, kept: Mapping[int, int]) -> Documents:
    documents = job.documents()
    for rank, count in kept.items():
        documents[rank]["entries"] = documents[rank]["entries"][-count:]
    return documents


def test_entries_that_a_full_buffer_has_lost():
    job = healthy()
    for _ in range(50):
        job.collective()
    job.collective(shape=[5], ranks=[0, 1, 3], state="started")
    assert named(job, full_buffer(job, {0: 10, 1: 9, 2: 7, 3: 20})) == (Scope.RANK, (2,))


def test_a_difference_is_found_in_what_full_buffers_still_show():
    job = healthy()
    for _ in range(50):
        job.collective()
    job.collective(shape=[5], ranks=[0, 1, 3], state="started")
    job.collective(shape=[6], ranks=[2], state="started")
    for kept in ({0: 10, 1: 9, 2: 7, 3: 20}, dict.fromkeys(range(4), 1)):
        found = explained(full_buffer(job, kept), 4)
        assert found.incident is not None
        assert found.incident.ranks == (2,)
        assert "all_reduce float32[6] as number 55 of group default_pg" in found.sentence


def only_active(job: Recorders) -> Documents:
    documents = job.documents()
    for document in documents.values():
        document["entries"] = [each for each in document["entries"] if each["state"] != "completed"]
    return documents


def test_dumps_of_open_operations_only():
    job = healthy(timed=False)
    job.collective("broadcast", ranks=[0], state="completed")
    job.collective("broadcast", ranks=[1, 3], state="scheduled")
    job.collective(ranks=[0], state="scheduled")
    assert named(job, only_active(job)) == (Scope.RANK, (2,))


def test_dumps_of_open_operations_only_after_a_source_went_on():
    """Rank 0's dump shows nothing, but its ``pg_status`` tells that it has issued the broadcast."""
    job = healthy(timed=False)
    job.collective("broadcast", ranks=[0], state="completed")
    job.collective("broadcast", ranks=[1, 3], state="scheduled")
    assert named(job, only_active(job)) == (Scope.RANK, (2,))


def test_batched_transfers_in_dumps_of_open_operations_only():
    """The launch of the first batch has completed and is left out; its parts still look scheduled."""
    job = healthy(3)
    job.batch(0, [("send", 1)])
    job.batch(1, [("recv", 0), ("send", 2)])
    job.batch(2, [("recv", 1)])
    job.collective()
    assert named(job, only_active(job)) == (None, ())
    job.batch(1, [("recv", 0)], state="started")
    assert named(job, only_active(job)) == (Scope.RANK, (0,))


def pipeline(**options: bool) -> Recorders:
    job = healthy(**options)
    for stage in range(3):
        job.send(stage, stage + 1)
        job.receive(stage, stage + 1)
    return job


def test_transfers_that_all_match_are_no_hang():
    assert named(pipeline()) == (None, ())


def test_a_receive_without_its_send():
    job = pipeline()
    job.receive(1, 2, state="started")
    found = explained(job.documents(), 4)
    assert found.incident is not None
    assert found.incident.ranks == (1,)
    assert "Rank 1 has not entered recv float32[8] number 2 of 1 -> 2" in found.sentence


def test_a_chain_of_transfers_leads_to_the_stage_that_is_late():
    job = pipeline(timed=False)
    job.receive(0, 1, state="scheduled")
    job.receive(1, 2, state="scheduled")
    job.receive(2, 3, state="scheduled")
    assert named(job) == (Scope.RANK, (0,))


def test_transfers_of_other_sizes_name_the_pair():
    job = pipeline()
    job.send(1, 2, state="started", shape=[8])
    job.receive(1, 2, state="started", shape=[16])
    assert named(job) == (Scope.PROCESS_GROUP, (1, 2))


def test_stages_that_receive_from_each_other():
    job = pipeline()
    job.receive(1, 0, state="started")
    job.receive(0, 1, state="started")
    found = explained(job.documents(), 4)
    assert found.incident is not None
    assert found.incident.ranks == (0, 1)
    assert "wait for each other" in found.sentence


def test_batched_transfers_have_the_state_of_their_launch():
    job = healthy(3)
    job.batch(0, [("send", 1)])
    job.batch(1, [("recv", 0), ("send", 2)])
    job.batch(2, [("recv", 1)])
    assert named(job) == (None, ())
    job.batch(1, [("recv", 0), ("send", 2)], state="started")
    job.batch(2, [("recv", 1)], state="started")
    assert named(job) == (Scope.RANK, (0,))


def test_transfers_of_full_buffers_are_counted_from_the_last_that_completed():
    job = healthy()
    for _ in range(40):
        job.send(0, 1)
        job.receive(0, 1)
    assert named(job, full_buffer(job, {0: 5, 1: 30})) == (None, ())
    job.receive(0, 1, state="started")
    assert named(job, full_buffer(job, {0: 5, 1: 30})) == (Scope.RANK, (0,))


def test_collectives_that_are_launched_together_are_one_operation():
    job = healthy(3)
    for rank in range(3):
        for number, state in enumerate(("scheduled", "scheduled", "completed")):
            name = "coalesced" if number == 2 else "all_gather_into_tensor_coalesced"
            job.collective(name, [4] if number < 2 else [], ranks=[rank], state=state)
            if number:
                job.entries[rank][-1]["collective_seq_id"] = job.entries[rank][-2]["collective_seq_id"]
        job._collectives[rank, ("0", "default_pg")] -= 2
    assert named(job) == (None, ())
    job.collective(ranks=[0, 1], state="started")
    assert named(job) == (Scope.RANK, (2,))


def test_groups_of_one_name_elsewhere_in_the_job_are_apart():
    """As ``split_group`` makes them."""
    job = Recorders(4)
    job.collective()
    documents = dict(job.documents())
    for ranks in ([0, 1], [2, 3]):
        other = Recorders(4)
        half = other.group("7", "half", ranks)
        other.collective()
        other.collective(
            group=half, ranks=ranks if 0 in ranks else [2], state="started" if 2 in ranks else "completed"
        )
        documents |= {rank: other.document(rank) for rank in ranks}
    found = explained(documents, 4)
    assert found.incident is not None
    assert found.incident.ranks == (3,)


def test_dumps_without_any_operation():
    found = explained({rank: {"entries": [], "pg_config": {}} for rank in range(2)}, 2)
    assert found.has_hang is None
    assert "no operations" in found.sentence


def damaged(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = healthy().document(0)
    change(document["entries"][1])
    return document


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.pop("profiling_name"),
        lambda entry: entry.update(state="melted"),
        lambda entry: entry.update(collective_seq_id="five"),
        lambda entry: entry.update(collective_seq_id=1 << 40),
        lambda entry: entry.update(process_group="default"),
        lambda entry: entry.update(input_sizes=[["a"]]),
        lambda entry: entry.update(input_sizes=[[-1]]),
        lambda entry: entry.update(frames=[{"name": 3}]),
        lambda entry: entry.update(profiling_name=["nccl:all_reduce"]),
    ],
)
def test_an_entry_that_is_not_understood_is_counted_and_left_out(change: Callable[[dict[str, Any]], Any]):
    dump = read_dump(0, damaged(change))
    assert (dump.unreadable, len(dump.entries)) == (1, 3)


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
    assert [each.collective for each in dump.entries] == [1, 2, 3, 4]
    assert {each.state for each in dump.entries} == {State.COMPLETED}
