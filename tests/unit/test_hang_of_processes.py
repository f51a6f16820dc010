"""Trainers that are gone, stopped or absent, machines that are lost, devices that are behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
from torchscout.decision.hang.diagnosis import diagnose
from torchscout.decision.progress import Phase, Process, RankStatus
from torchscout.decision.records.record import Action, Scope
from torchscout.mesh import Mesh

# k, l, m: the process itself.


@with_and_without_stacks
@pytest.mark.parametrize("gone", [0, 5])
def test_gone_trainer_is_named_and_no_survivor(gone: int, stacks: bool):
    job = replicas(stacks=stacks)
    job.issue("world", *others(gone))
    job.gone(gone)
    incident = found(job)
    assert (incident.scope, incident.ranks, incident.action) == (Scope.RANK, (gone,), Action.RESTART)
    assert "its process is gone" in incident.sentence


@with_and_without_stacks
@pytest.mark.parametrize("halted", [Process.GONE, Process.STOPPED])
def test_trainer_that_died_inside_the_collective_is_named(halted: Process, stacks: bool):
    """It has announced the operation like everybody else: progress is equal, and yet it is the one."""
    job = replicas(stacks=stacks)
    job.issue("world", *range(8))
    job.process[2] = halted
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (2,))
    assert f"has not finished {ALL_REDUCE} number 4" in incident.sentence


def test_trainer_that_died_inside_a_collective_is_named_beside_one_that_is_late():
    job = replicas(4, on_each=1)
    job.issue("world", 0, 1, 2)
    job.gone(2)
    job.busy(3, phase=Phase.INPUT)
    assert found(job).ranks == (2, 3)


@pytest.mark.parametrize("absent", [0, 5])
def test_rank_that_is_merely_absent_is_not_named_though_everybody_else_waits(absent: int):
    """Its trainer may be gone with its observer, or its report is lost and the transport has stalled."""
    job = replicas()
    job.issue("world", *others(absent))
    job.absent.add(absent)
    incident = found(job)
    expected = Scope.PROCESS_GROUP, tuple(range(8)), Action.INSPECT
    assert (incident.scope, incident.ranks, incident.action) == expected
    assert f"All 8 members but 1 entered {ALL_REDUCE} number 4" in incident.sentence
    assert f"Rank {absent} did not answer: it is not known whether it, the runtime" in incident.sentence


@with_and_without_stacks
def test_rank_is_named_where_its_report_shows_that_it_is_late(stacks: bool):
    job = replicas(stacks=stacks)
    job.issue("world", *others(5))
    job.busy(5, phase=Phase.INPUT)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (5,))


def test_absent_rank_of_a_job_in_which_nobody_waits_is_no_incident():
    job = replicas()
    job.busy(*range(8), phase=Phase.EVALUATION)
    job.absent.add(5)
    assert diagnose(job.standings().values(), job.lines, job.mesh) is None


def test_absence_in_a_tensor_group_is_followed_through_its_victim():
    job = StuckJob(Mesh.grid(replica=4, tensor=2))
    tensor, replica = job.along("tensor"), job.along("replica")
    for rank in others(4):
        job.issue(tensor[rank], rank)
    for rank in others(4, 5):
        job.issue(replica[rank], rank)
    job.absent.add(4)
    incident = found(job)
    assert incident.scope is Scope.PROCESS_GROUP
    assert incident.ranks == (0, 2, 4, 5, 6), "the groups of rank 4, and not the ranks that wait for rank 5"
    assert "Rank 4 did not answer: it is not known" in incident.sentence


def test_trainer_that_died_before_it_published_anything():
    job = replicas(4)
    job.issue("world", 0, 1, 2)
    standings = job.standings() | {3: RankStatus(3, Process.GONE, None)}
    incident = diagnose(standings.values(), job.lines, job.mesh)
    assert incident is not None
    assert incident.ranks == (3,)


def test_who_issued_something_else_is_named_though_another_died_of_it_and_nobody_waits():
    """A library may end a process over what it has posted, while all go on: here, to groups of one."""
    job = replicas(4)
    job.issue("world", 0, 2, 3)
    job.issue("world", 1, text="all_reduce float64[1024] sum")
    for rank in range(4):
        job.issue(job.group(f"alone.{rank}", rank), rank)
        job.waiting[rank] = False
    assert diagnose(job.standings().values(), job.lines, job.mesh) is None
    job.gone(2)
    job.waiting[2] = None
    assert found(job).ranks == (1,)


def test_death_that_followed_from_another_death_is_not_named():
    """A lost connection ends one trainer after the other, each inside the wait for the one before."""
    job = four_by_two(stacks=True)
    tensor, replica = job.along("tensor"), job.along("replica")
    job.issue(tensor[5], 5)
    for rank in others(4, 5):
        job.issue(tensor[rank], rank)
        job.issue(replica[rank], rank)
    job.gone(*range(8))
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (4,))
    assert "7 ranks wait for it" in incident.sentence


@with_and_without_stacks
def test_stopped_trainer_is_named_and_hardware_inspected(stacks: bool):
    job = replicas(stacks=stacks)
    job.issue("world", *others(1))
    job.stopped(1)
    incident = found(job)
    assert (incident.ranks, incident.action) == ((1,), Action.INSPECT)
    assert "its process is stopped" in incident.sentence


def test_stopped_trainer_is_named_whatever_its_last_stack_showed():
    job = replicas(4)
    job.issue("world", 0, 1, 2)
    job.stopped(3)
    standings = job.standings()
    standings[3] = replace(standings[3], waiting=True)
    incident = diagnose(standings.values(), job.lines, job.mesh)
    assert incident is not None
    assert incident.ranks == (3,)


def test_trainer_that_posted_ahead_of_the_others_and_died_is_named():
    """What they are in, it has announced and more; that it does not return has one explanation."""
    job = replicas(4)
    job.issue("world", 0, 1, 2, 3)
    job.issue("world", 3)
    job.issue("world", 3)
    job.gone(3)
    assert found(job).ranks == (3,)


def test_running_trainer_that_gives_no_stack_and_never_came():
    """It holds the interpreter lock right after a collective that all others have left."""
    job = replicas()
    job.issue("world", *range(8))
    job.waiting[3] = None
    job.busy(*others(3))
    job.issue("world", *others(3))
    incident = found(job)
    assert (incident.scope, incident.ranks, incident.action) == (Scope.RANK, (3,), Action.RESTART)


def test_trainer_that_waits_for_something_unobserved_is_reported_so():
    job = replicas(2)
    job.issue("world", 0)
    job.recent[1].clear()
    job.busy(1)
    job.waiting[1] = True
    incident = found(job)
    assert incident.ranks == (1,)
    assert "waiting for a communication that was not observed" in incident.sentence


# Machines and observers.


@with_and_without_stacks
def test_machine_of_which_nobody_answers_is_gone(stacks: bool):
    """Of its four ranks only two are waited for so far; the machine is lost with all of them."""
    job = StuckJob(Mesh.grid(replica=4, tensor=4, hosts=nodes(16, 4)), stacks=stacks)
    replica = job.along("replica")
    for rank in range(16):
        if rank not in (4, 5, 6, 7) and rank % 4 < 2:
            job.issue(replica[rank], rank)
        else:
            job.busy(rank)
    job.absent |= {4, 5, 6, 7}
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.MACHINE, (4, 5, 6, 7))
    assert (incident.hosts, incident.action) == (("node-1",), Action.REPLACE)
    assert incident.sentence == (
        "Machine node-1 is gone: ranks 4, 5, 6 and 7 did not answer. 6 ranks wait for them."
    )


def test_machine_of_one_rank_that_does_not_answer_is_gone_but_not_one_that_crashed():
    for absent, action in ((True, Action.REPLACE), (False, Action.RESTART)):
        job = replicas(4, on_each=1)
        job.issue("world", 0, 1, 3)
        job.absent |= {2} if absent else set()
        job.gone(2)
        incident = found(job)
        assert (incident.ranks, incident.action) == ((2,), action)
        assert incident.scope is (Scope.MACHINE if absent else Scope.RANK)


def test_machine_on_which_every_trainer_is_gone_is_replaced():
    job = replicas()
    job.issue("world", *others(4, 5))
    job.gone(4, 5)
    incident = found(job)
    assert (incident.scope, incident.ranks, incident.action) == (Scope.MACHINE, (4, 5), Action.REPLACE)


def test_observer_that_is_missing_from_a_healthy_rank_is_not_blamed():
    """Rank 2 is in the very group that is held up, but 5 explains the wait."""
    job = replicas()
    job.issue("world", *others(5))
    job.busy(5, phase=Phase.INPUT)
    job.absent.add(2)
    incident = found(job)
    assert incident.ranks == (5,)
    assert 2 not in incident.records[0].peers
    assert incident.sentence.endswith(" Rank 2 did not answer.")


def test_absent_rank_that_nobody_waits_for_is_not_blamed():
    job = StuckJob(Mesh.grid(replica=3, tensor=2))
    tensor = job.along("tensor")
    job.issue(tensor[0], 0)
    job.busy(*others(0, count=6))
    job.absent.add(5)
    assert found(job).ranks == (1,)


# Devices that run ahead of their hosts.


def test_device_that_is_behind_is_the_source_when_hosts_are_equal():
    job = replicas(4)
    job.issue("world", *range(4))
    job.device = {0: 12, 1: 12, 2: 11, 3: 12}
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (2,))
    assert "its device is behind at step 11. 3 ranks wait for it" in incident.sentence
    job.device = {0: 11, 1: 11, 2: 11, 3: 12}
    assert found(job).scope is Scope.PROCESS_GROUP, "one that is ahead blames nobody"


def test_late_host_whose_device_is_unknown_is_a_matter_of_the_group():
    job = replicas(4)
    job.issue("world", 0, 1, 3)
    job.busy(2)
    job.device = {0: 12, 1: 12, 3: 12}
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1, 2, 3))
    job.device[2] = 12
    assert found(job).ranks == (2,)
    del job.device[2]
    job.gone(2)
    assert found(job).ranks == (2,), "the dead have no device"
