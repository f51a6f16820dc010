"""Ranks that issued another operation, visible or behind later ones; AllToAll splits that do not fit."""

from __future__ import annotations

import pytest

from tests.support.stuck_job import ALL_REDUCE, StuckJob, found, with_and_without_stacks
from torchscout.decision.progress import Phase
from torchscout.decision.records.record import Action, Scope
from torchscout.mesh import Mesh


def replicas(count: int, *, stacks: bool = True, window: int = 12) -> StuckJob:
    job = StuckJob(Mesh.grid(replica=count), stacks=stacks, window=window)
    job.group("world", *range(count))
    for _ in range(2):
        job.issue("world", *range(count))
    return job


# d: something else on one rank.


@with_and_without_stacks
@pytest.mark.parametrize(
    "other",
    [
        "broadcast float32[1024] root 0",
        "all_reduce float32[512] sum",
        "all_reduce bfloat16[1024] sum",
        "all_reduce float32[1024] max",
    ],
    ids=["operation", "shape", "dtype", "reduction"],
)
def test_rank_with_a_different_operation_is_named(other: str, stacks: bool):
    job = replicas(4, stacks=stacks)
    job.issue("world", 0, 1, 3)
    job.issue("world", 2, text=other)
    incident = found(job)
    assert (incident.scope, incident.ranks, incident.action) == (Scope.RANK, (2,), Action.RESTART)
    assert (
        incident.sentence
        == f"Rank 2 issued {other} as number 3 of group world, where other members issued {ALL_REDUCE}."
    )
    deciding = incident.records[0]
    assert (deciding.surface, deciding.peers, deciding.ranks) == ("fingerprint/world", (0, 1, 2, 3), (2,))
    assert deciding.fingerprints == (ALL_REDUCE, ALL_REDUCE, other)


def test_rank_with_a_different_root_is_named():
    job = replicas(3)
    job.issue("world", 0, 2, text="broadcast int64[1] root 0")
    job.issue("world", 1, text="broadcast int64[1] root 1")
    assert found(job).ranks == (1,)


# e: hidden behind later operations.


@with_and_without_stacks
def test_first_difference_is_found_behind_operations_launched_since(stacks: bool):
    job = replicas(4, stacks=stacks)
    job.issue("world", 0, 1, 3)
    job.issue("world", 2, text="barrier")
    for _ in range(4):
        job.issue("world", *range(4))
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (2,))
    assert "issued barrier as number 3 of group world" in incident.sentence


def test_first_difference_on_one_line_is_found_though_everybody_waits_in_another():
    job = replicas(4)
    job.group("other", *range(4))
    job.issue("world", 0, 1, 3)
    job.issue("world", 2, text="barrier")
    job.issue("other", *range(4))
    assert found(job).ranks == (2,)


@with_and_without_stacks
def test_rank_that_skipped_an_operation_is_named_and_not_those_it_waits_for(stacks: bool):
    """It is one ahead now: by numbers the others are late, by digests it took another path."""
    job = replicas(4, stacks=stacks)
    job.issue("world", 0, 1, 3, text="all_gather float32[8]")
    job.issue("world", 2)
    job.issue("world", 2, text="barrier")
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (2,))
    assert "where other members issued all_gather float32[8]" in incident.sentence


def test_difference_behind_all_that_is_visible_is_voted_on_by_digests():
    job = replicas(4, window=3)
    job.issue("world", 0, 1, 3)
    job.issue("world", 2, text="barrier")
    for _ in range(5):
        job.issue("world", *range(4))
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (2,))
    assert incident.records[0].surface == "digest/world"
    assert "before number 8" in incident.sentence
    assert "barrier" not in incident.sentence


def test_majority_is_taken_where_enough_members_show_the_number():
    """The window of rank 0 begins later: of number 3 only two members are left to see."""
    job = replicas(3)
    job.issue("world", 1)
    job.issue("world", 0, 2, text="barrier")
    job.issue("world", 0, 1, 2)
    while len(job.recent[0]) > 1:
        job.recent[0].popleft()
    assert found(job).ranks == (1,)


def test_difference_is_found_when_it_was_posted_and_no_stack_shows_the_wait():
    job = replicas(3, stacks=False)
    job.issue("world", 0, 2)
    job.issue("world", 1, text="barrier")
    job.busy(*range(3), phase=Phase.OPTIMIZER)
    job.issue(job.pair(0, 1), 0)
    assert found(job).ranks == (1,)


def test_first_majority_decides_and_not_what_followed_from_the_difference():
    """At number 4 rank 3 differs as well, and there is no majority left; its number 3 is out of sight."""
    job = replicas(4)
    job.issue("world", 0, 1, 3)
    job.issue("world", 2, text="barrier")
    job.issue("world", 0, 1, 2)
    job.issue("world", 3, text="all_gather float32[8]")
    while len(job.recent[3]) > 1:
        job.recent[3].popleft()
    assert (found(job).scope, found(job).ranks) == (Scope.RANK, (2,))


# What a divergence outranks, and what it does not.


def test_divergence_outranks_the_waits_it_causes():
    """Rank 2 left its own broadcast and now works; 0 and 5 wait elsewhere for those it left behind."""
    job = StuckJob(Mesh.grid(replica=6))
    job.issue(job.group("three", 1, 2, 3), 1, 3)
    job.issue("three", 2, text="broadcast int64[1] root 2")
    job.busy(2)
    job.issue(job.group("two", 0, 1), 0)
    job.issue(job.group("more", 2, 5), 5)
    assert found(job).ranks == (2,)


def test_trainer_that_the_difference_killed_is_a_victim():
    """The library may abort the neighbour that received the wrong size."""
    job = replicas(4)
    job.issue("world", 0, 2, 3)
    job.issue("world", 1, text="all_reduce float32[512] sum")
    job.gone(0)
    assert found(job).ranks == (1,)


def test_trainer_that_a_difference_killed_while_all_were_busy_is_a_victim():
    """What was posted arrives while its receiver is on to something else."""
    job = replicas(4)
    job.issue("world", 0, 2, 3)
    job.issue("world", 1, text="all_reduce float32[512] sum")
    job.busy(*range(4))
    job.gone(0)
    assert found(job).ranks == (1,)


def test_two_that_differ_and_are_waited_for_are_listed_for_that():
    """What they got of each other keeps both busy, and the others wait for them elsewhere."""
    job = StuckJob(Mesh.grid(replica=2, tensor=2))
    job.issue(job.group("pair", 2, 3), 2)
    job.issue("pair", 3, text="barrier")
    job.busy(2, 3)
    job.issue(job.group("first", 0, 2), 0)
    job.issue(job.group("second", 1, 3), 1)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (2, 3))
    assert incident.records[0].surface == "fingerprint/pair"


def test_late_rank_does_not_differ():
    job = replicas(4)
    job.issue("world", 0, 1, 3)
    job.issue("world", 0, 1, 3, text="barrier")
    job.busy(2, phase=Phase.INPUT)
    incident = found(job)
    assert incident.ranks == (2,)
    assert {record.surface for record in incident.records} == {"issued/world", "coordinate"}


@with_and_without_stacks
def test_difference_on_a_line_that_nobody_is_at_is_no_hang(stacks: bool):
    job = replicas(4, stacks=stacks)
    job.issue("world", 0, 1, 3)
    job.issue("world", 2, text="barrier")
    job.busy(*range(4))
    assert job.diagnose() is None


# o: no majority.


@with_and_without_stacks
def test_two_members_that_differ_are_both_listed(stacks: bool):
    job = StuckJob(Mesh.grid(replica=2, tensor=2), stacks=stacks)
    tensor = job.along("tensor")
    job.issue(tensor[0], 0, 1)
    job.issue(tensor[0], 0)
    job.issue(tensor[0], 1, text="barrier")
    incident = found(job)
    assert (incident.scope, incident.ranks, incident.action) == (Scope.PROCESS_GROUP, (0, 1), Action.RESTART)
    assert f"{ALL_REDUCE} or barrier as number 2" in incident.sentence
    assert "no majority" in incident.sentence


def test_ends_of_a_message_that_do_not_match_are_both_listed():
    job = StuckJob(Mesh.grid(pipeline=3))
    job.issue(job.pair(0, 1), 0, text="float32[8]")
    job.issue("0 -> 1", 1, text="float32[16]")
    job.issue(job.pair(1, 2), 2, text="float32[8]")
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1))


def test_two_against_two_names_the_group():
    job = replicas(4)
    job.issue("world", 0, 1)
    job.issue("world", 2, 3, text="barrier")
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1, 2, 3))


def test_member_that_two_different_pairs_share_is_named():
    """Rank 3 skips a layer: neither its tensor pair nor its replica pair has a majority, both together do."""
    job = StuckJob(Mesh.grid(replica=2, tensor=2))
    for lines in (job.along("tensor"), job.along("replica")):
        for rank in range(4):
            job.issue(lines[rank], rank, text="barrier" if rank == 3 else ALL_REDUCE)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (3,))
    assert len(incident.records) == 3, "both pairs and the vote"


def test_member_that_a_pair_and_a_split_group_share_does_not_explain_both():
    """Even without rank 3 the four would be divided."""
    job = StuckJob(Mesh.grid(replica=5))
    job.issue(job.group("four", 0, 1, 2, 3), 0, 1)
    job.issue("four", 2, 3, text="barrier")
    job.issue(job.group("pair", 3, 4), 3)
    job.issue("pair", 4, text="barrier")
    assert (found(job).scope, found(job).ranks) == (Scope.PROCESS_GROUP, (0, 1, 2, 3, 4))


def test_difference_that_the_named_rank_has_no_part_in_is_not_its_proof():
    job = StuckJob(Mesh.grid(replica=5))
    job.issue(job.group("three", 0, 1, 2), 0, 1)
    job.issue("three", 2, text="barrier")
    job.issue(job.group("pair", 3, 4), 3)
    job.issue("pair", 4, text="barrier")
    incident = found(job)
    assert incident.ranks == (2,)
    assert [record.surface for record in incident.records] == ["fingerprint/three", "coordinate"]


# p: AllToAll.


def exchange(job: StuckJob, matrix: list[list[int]], wrong: dict[int, list[int]] | None = None) -> None:
    """``matrix[i][j]`` is what i sends to j; ``wrong`` is what some ranks expect instead."""
    for rank, sends in enumerate(matrix):
        receives = (wrong or {}).get(rank, [row[rank] for row in matrix])
        job.issue("experts", rank, text="all_to_all bfloat16", sends=sends, receives=receives)


UNEVEN = [[0, 7, 1, 3], [9, 9, 0, 0], [1, 2, 3, 4], [5, 0, 0, 5]]


def experts() -> StuckJob:
    job = StuckJob(Mesh.grid(replica=4))
    job.group("experts", *range(4))
    return job


def test_uneven_splits_are_healthy():
    job = experts()
    exchange(job, UNEVEN)
    job.busy(*range(4))
    job.issue("experts", 0, 1, 3)
    incident = found(job)
    assert incident.ranks == (2,), "late, and nothing else"
    assert not any("splits" in record.surface for record in incident.records)


def test_member_whose_splits_fit_nobody_is_named():
    job = experts()
    exchange(job, UNEVEN, wrong={2: [2, 1, 3, 1]})
    incident = found(job)
    assert (incident.scope, incident.ranks, incident.action) == (Scope.RANK, (2,), Action.RESTART)
    deciding = incident.records[0]
    assert deciding.surface == "splits/experts"
    assert deciding.verdict is not None
    assert deciding.verdict.evidence == (1, 1, 3, 1)


def test_one_pair_that_does_not_fit_names_the_group():
    job = experts()
    exchange(job, UNEVEN, wrong={2: [1, 0, 3, 99]})
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1, 2, 3))


def test_members_that_have_not_entered_the_exchange_are_not_compared():
    job = experts()
    job.issue("experts", *range(4))
    for rank in (0, 1, 2):
        receives = [row[rank] for row in UNEVEN]
        job.issue("experts", rank, text="all_to_all bfloat16", sends=UNEVEN[rank], receives=receives)
    job.busy(3)
    assert found(job).ranks == (3,)


def test_two_members_whose_splits_do_not_fit_are_both_listed():
    job = StuckJob(Mesh.grid(replica=2))
    job.group("experts", 0, 1)
    exchange(job, [[1, 2], [3, 4]], wrong={0: [1, 9], 1: [9, 4]})
    assert (found(job).scope, found(job).ranks) == (Scope.PROCESS_GROUP, (0, 1))


def test_member_whose_own_share_does_not_fit_is_named_among_three_but_not_of_two():
    """What a rank sends to itself is a pair of one; with another misfit of its own it still is alone."""
    job = StuckJob(Mesh.grid(replica=3))
    job.group("experts", 0, 1, 2)
    exchange(job, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], wrong={1: [2, 50, 80]})
    assert (found(job).scope, found(job).ranks) == (Scope.RANK, (1,))
    job = StuckJob(Mesh.grid(replica=2))
    job.group("experts", 0, 1)
    exchange(job, [[1, 2], [3, 4]], wrong={1: [2, 40]})
    assert (found(job).scope, found(job).ranks) == (Scope.PROCESS_GROUP, (0, 1))
