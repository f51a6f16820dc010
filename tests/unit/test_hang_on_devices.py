"""Hangs where devices enter the operations, later than hosts issue them, as over NCCL."""

from __future__ import annotations

import pytest

from tests.support.stuck_job import StuckJob, found, four_by_two, nodes, others, replicas
from torchscout.decision.progress import Phase
from torchscout.decision.records.record import Action, Scope
from torchscout.mesh import Mesh


@pytest.fixture(params=[None, True, False], ids=["unclear", "waits", "works"])
def shown(request: pytest.FixtureRequest) -> bool | None:
    """What the stack of every host shows: over NCCL it says nothing about communication."""
    return request.param


def ahead(job: StuckJob, shown: bool | None) -> None:
    """All hosts went on after what they issued, to wherever their stacks show them."""
    job.busy(*range(len(job.mesh)), phase=Phase.IDLE)
    job.waiting = dict.fromkeys(range(len(job.mesh)), shown)


def test_a_late_host_is_named(shown: bool | None):
    job = replicas(8)
    job.issue("world", *others(5))
    job.on_devices()
    ahead(job, shown)
    incident = found(job)
    assert (incident.scope, incident.ranks, incident.action) == (Scope.RANK, (5,), Action.RESTART)
    assert "Rank 5 on node-2 has not entered all_reduce float32[1024] sum number 4" in incident.sentence
    assert "7 ranks wait" in incident.sentence
    assert incident.records[0].surface == "entered/world"


def test_a_stuck_device_is_named_although_its_host_ran_ahead(shown: bool | None):
    job = replicas(8)
    job.issue("world", *range(8))
    job.on_devices(5)
    job.issue("world", *range(8))  # further ahead, where no device has come to
    job.device = dict.fromkeys(range(8), 6)
    ahead(job, shown)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (5,))
    assert "has issued all_reduce float32[1024] sum number 4 of group world, but" in incident.sentence
    assert "its device has not reached it; its device is behind at step 6" in incident.sentence


def test_all_devices_in_the_same_operation_are_a_stall_of_the_group(shown: bool | None):
    job = replicas(4)
    job.issue("world", *range(4))
    job.on_devices()
    job.busy_devices = set(range(4))
    ahead(job, shown)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1, 2, 3))
    assert "All 4 members entered all_reduce float32[1024] sum number 4 of group world" in incident.sentence


def test_idle_devices_are_not_blamed(shown: bool | None):
    job = replicas(4)
    job.on_devices()
    ahead(job, shown)
    assert job.diagnose() is None


def test_a_victim_of_another_group_is_not_blamed(shown: bool | None):
    job = four_by_two(stacks=True)
    tensor, replica = job.along("tensor"), job.along("replica")
    job.on_devices()
    before = {rank: dict(issued) for rank, issued in job.issued.items()}
    for rank in range(8):
        job.issue(tensor[rank], rank)
        job.issue(replica[rank], rank)
    job.on_devices()
    job.entered[3] = before[3]  # its device never comes to the tensor group's operation
    job.entered[2][replica[2]] -= 1  # whose device waits there for it
    ahead(job, shown)
    assert found(job).ranks == (3,)


def test_another_operation_is_named(shown: bool | None):
    job = replicas(4)
    job.issue("world", *others(1, count=4))
    job.issue("world", 1, text="all_gather float32[8]")
    job.on_devices()
    ahead(job, shown)
    incident = found(job)
    assert incident.ranks == (1,)
    assert "issued all_gather float32[8] as number 4 of group world" in incident.sentence


def test_two_devices_that_wait_for_each_other_are_not_distinguished(shown: bool | None):
    job = StuckJob(Mesh.grid(replica=2, hosts=nodes(2)))
    first, second = job.group("first", 0, 1), job.group("second", 0, 1)
    for rank, order in ((0, (first, second)), (1, (second, first))):
        for line in order:
            job.issue(line, rank)
    job.on_devices()
    job.entered[0][second] = job.entered[1][first] = 0
    ahead(job, shown)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1))
    assert "in different orders or left one out" in incident.sentence


def test_a_rank_that_waits_on_the_host_for_a_rank_whose_device_waits_is_no_source():
    """A check of SCOUT's own waits over Gloo, while training's collectives run over NCCL."""
    job = replicas(4)
    checks = job.group("checks", *range(4))
    job.issue("world", *range(4))
    job.on_devices(2)
    job.entered = {rank: {"world": entered["world"]} for rank, entered in job.entered.items()}
    job.issue(checks, 0, 1)
    job.waiting = {0: True, 1: True, 2: None, 3: None}
    job.inside -= {2, 3}
    assert found(job).ranks == (2,)


def test_a_device_that_is_not_known_leaves_it_to_the_group():
    job = replicas(4)
    job.issue("world", *others(2, count=4))
    job.on_devices()
    job.entered[2] = {}
    job.device = dict.fromkeys(others(2, count=4), 6)
    ahead(job, None)
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (0, 1, 2, 3))


def inside_graphs(*, captured: bool = True) -> StuckJob:
    """The gradients' all-reduce is in a CUDA graph: hosts publish steps, and no operation."""
    job = StuckJob(Mesh.grid(replica=4, hosts=nodes(4)))
    job.group("world", *range(4))
    job.issue("world", *range(4))
    job.on_devices()
    job.captured = set(range(4)) if captured else set()
    ahead(job, None)
    job.busy(*others(2, count=4))
    return job


@pytest.mark.parametrize("captured", [True, False], ids=["captured before", "captured unseen"])
def test_a_rank_that_is_missing_inside_cuda_graphs_is_named(captured: bool):
    job = inside_graphs(captured=captured)
    job.busy_devices = set(others(2, count=4))
    incident = found(job)
    assert (incident.scope, incident.ranks) == (Scope.RANK, (2,))
    assert "Communication inside CUDA graphs is not observed" in incident.sentence
    assert incident.records[0].surface == "device"


def test_devices_that_are_all_busy_inside_cuda_graphs_name_nobody():
    job = inside_graphs()
    job.busy_devices = set(range(4))  # though all stand at the operation before the graph
    incident = found(job)
    assert incident.scope is Scope.JOB
    assert "so that nobody can be named" in incident.sentence


def test_devices_that_are_all_busy_without_cuda_graphs_just_compute():
    job = inside_graphs(captured=False)
    job.lines.clear()
    job.busy_devices = set(range(4))
    assert job.diagnose() is None
