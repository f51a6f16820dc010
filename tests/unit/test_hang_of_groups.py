"""Hangs in which nobody is late: ranks that wait for each other, and operations that do not return."""

from __future__ import annotations

from tests.support.stuck_job import (
    ALL_REDUCE,
    StuckJob,
    found,
    four_by_two,
    nodes,
    others,
    replicas,
    with_and_without_stacks,
)
from torchscout.decision.progress import Phase
from torchscout.decision.records.record import Action, Scope
from torchscout.mesh import Mesh

# i: opposite order.


@with_and_without_stacks
def test_two_groups_entered_in_opposite_order_are_a_deadlock(stacks: bool):
    job = StuckJob(Mesh.grid(replica=4), stacks=stacks)
    job.issue(job.group("everybody", 0, 1, 2, 3), 0, 2, 3)
    job.issue(job.group("couple", 0, 1), 1, text="broadcast int64[1] root 0")
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1)), "2 and 3 only wait for them"
    assert incident.action is Action.RESTART
    for part in ("wait for each other", f"rank 0 in {ALL_REDUCE} number 1 of group everybody"):
        assert part in incident.sentence
    assert "rank 1 in broadcast int64[1] root 0 number 1 of group couple" in incident.sentence
    assert [record.surface for record in incident.records[:3]] == [
        "deadlock",
        "issued/everybody",
        "issued/couple",
    ]


def test_one_rank_that_entered_another_group_than_all_others_is_named():
    """Everybody waits for everybody: who waits for whom decides nothing, and the majority does."""
    job = replicas()
    job.group("eval", *range(8))
    job.issue("world", *others(6))
    job.issue("eval", 6, text="barrier")
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (6,))
    assert "rank 6 in barrier number 1 of group eval" in incident.sentence


def test_every_cycle_of_a_program_that_is_wrong_everywhere_is_reported():
    job = StuckJob(Mesh.grid(replica=2, tensor=4))
    for first in range(0, 8, 2):
        job.issue(job.group(f"a{first}", first, first + 1), first)
        job.issue(job.group(f"b{first}", first, first + 1), first + 1)
    incident = found(job)
    assert incident.ranks == tuple(range(8))
    assert "3 more such cycles" in incident.sentence


# j: nobody is behind.


@with_and_without_stacks
def test_equal_progress_is_a_stall_of_that_group_and_of_no_rank(stacks: bool):
    """The tensor group of replica 2 is stuck; the others, waiting in replica groups, are not part of it."""
    job = four_by_two(stacks)
    tensor, replica = job.along("tensor"), job.along("replica")
    for rank in range(8):
        job.issue(tensor[rank], rank)
    for rank in others(4, 5):
        job.issue(replica[rank], rank)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (4, 5))
    assert incident.action is Action.INSPECT
    assert incident.records[0].ranks == ()
    assert "No rank is behind" in incident.sentence
    assert (
        f"All 2 members entered {ALL_REDUCE} number 2 of group tensor.4, which has not returned for 6.0 s"
        in incident.sentence
    )


@with_and_without_stacks
def test_whole_world_stuck_in_one_collective(stacks: bool):
    job = replicas(stacks=stacks)
    job.issue("world", *range(8))
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, tuple(range(8)))
    assert incident.action is Action.INSPECT


def test_all_groups_stuck_at_once_have_job_scope():
    job = four_by_two(stacks=True)
    for rank, key in job.along("replica").items():
        job.issue(key, rank)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.JOB, tuple(range(8)))


def test_message_that_was_sent_and_never_arrives_names_the_pair():
    job = StuckJob(Mesh.grid(pipeline=4))
    job.issue(job.pair(1, 2), 1, 2, text="activation")
    job.busy(1)
    job.issue(job.pair(2, 3), 3, text="activation")
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (1, 2))


@with_and_without_stacks
def test_receive_posted_early_does_not_make_a_deadlock_of_a_stall(stacks: bool):
    """Ranks 0 and 1 are stuck in their collective; that 2 owes 0 a message, and waits for 0, is no cause."""
    job = StuckJob(Mesh.grid(replica=3), stacks=stacks)
    job.issue(job.pair(2, 0), 0)
    job.issue(job.group("couple", 0, 1), 0, 1)
    job.issue(job.pair(0, 2), 2)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1))


def test_stall_of_a_posted_operation_is_of_the_line_whose_members_all_wait():
    """Both published more after it, and sent a message: the message is not what they wait for."""
    job = StuckJob(Mesh.grid(replica=4))
    job.issue(job.group("couple", 0, 1), 0, 1)
    job.issue(job.pair(0, 2), 0, 2)
    job.issue(job.pair(1, 3), 1, 3)
    job.busy(*range(4), phase=Phase.OPTIMIZER)
    job.waiting |= {0: True, 1: True}
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1))


def test_without_stacks_a_whole_line_that_is_equally_far_is_not_blamed_on_its_ranks():
    job = StuckJob(Mesh.grid(replica=3), stacks=False)
    job.issue(job.group("couple", 0, 1), 0, 1)
    job.busy(0, 1, phase=Phase.OPTIMIZER)
    job.issue(job.group("a", 0, 2), 2)
    job.issue(job.group("b", 1, 2), 2)
    job.waiting[2] = True
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1))


def test_absent_ranks_are_not_named_for_a_stall():
    """Scenario 161 of deepseek-v3: a transfer stalls, and the only report that is lost is a member's."""
    job = StuckJob(Mesh.grid(replica=8, hosts=nodes(8)))
    job.issue(job.group("couple", 0, 1), 0, 1)
    for absent in ({1}, {1, 7}):
        job.absent |= absent
        incident = found(job)
        assert (incident.scope, incident.ranks, incident.action) == (
            Scope.PROCESS_GROUP,
            (0, 1),
            Action.INSPECT,
        )
        assert "Rank 1 did not answer: it is not known whether it, the runtime" in incident.sentence
    assert "Rank 7 did not answer" in incident.sentence


def test_rank_that_died_in_a_stall_is_named_and_one_that_is_absent_is_not():
    job = StuckJob(Mesh.grid(replica=8, hosts=nodes(8)))
    job.issue(job.group("three", 0, 1, 2), 0, 1, 2)
    job.absent |= {1}
    job.gone(2)
    assert found(job).ranks == (2,)
