"""Nobody moves: who is named for it, and above all who is not, for the victims stand still as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from tests.scenarios.paper import (
    ALL_GATHER,
    BARRIER,
    Job,
    one_each,
    replicas,
    two_each,
)
from tests.scenarios.rows import Either, Row, cases, check, either, hang
from tests.scenarios.today import rounds

EVERYBODY = (0, 1, 2, 3)


def stuck(ranks: Sequence[int], scope: str = "process group") -> Either:
    """Nobody is behind: the transport, a device or the runtime is to be looked at."""
    return either([hang(ranks, scope, "inspect")], [hang(ranks, scope, "preflight")])


def four_by_two() -> Job:
    """4 replicas of 2 tensor slices, each replica on a machine of its own."""
    return Job(replica=4, tensor=2, machines=two_each(8)).steps(2)


def tensor_then_replica(*, late: int) -> Job:
    """Every rank needs its tensor group first, and then its replica group. One is late for the first."""
    job = four_by_two()
    tensor, replica = job.along("tensor"), job.along("replica")
    for rank in job.all_but(late):
        job.enter(tensor[rank], rank)
    for rank in job.all_but(*job.members(tensor[late])):
        job.enter(replica[rank], rank)
    return job.work("input", late)


def sharded() -> Job:
    """Rank 6 never enters the all-gather of its shards; the other replica goes on until it needs this one."""
    job = Job(replica=2, shard=4).steps(2)
    shard, replica = job.along("shard"), job.along("replica")
    for rank in job.all_but(6):
        job.enter(shard[rank], rank, operation=ALL_GATHER)
    for rank in range(4):
        job.enter(replica[rank], rank)
    return job.work("forward", 6)


def tensor_group_that_stalls() -> Job:
    job = four_by_two()
    tensor, replica = job.along("tensor"), job.along("replica")
    for rank in range(8):
        job.enter(tensor[rank], rank)
    for rank in job.all_but(4, 5):
        job.enter(replica[rank], rank)
    return job


def all_replica_groups_that_stall() -> Job:
    job = four_by_two()
    for rank, group in job.along("replica").items():
        job.enter(group, rank)
    return job


def left_out_of_a_pair() -> Job:
    """Rank 6 goes on to its replicas and to the whole job without the last operation of its tensor pair."""
    job = Job(replica=4, tensor=2, machines=one_each(8), stacks="shown").steps(2)
    tensor, replica = job.along("tensor"), job.along("replica")
    for rank in range(8):
        job.enter(tensor[rank], rank)
    for rank in job.all_but(6):
        job.enter(tensor[rank], rank)
    for rank in job.all_but(7):
        job.enter(replica[rank], rank)
    return job.enter("world", 0, 2, 4, 6)


def pairs_in_opposite_order() -> Job:
    job = Job(replica=2, tensor=4).steps(2)
    for first in range(0, 8, 2):
        job.group(f"a{first}", first, first + 1).group(f"b{first}", first, first + 1)
        job.enter(f"a{first}", first).enter(f"b{first}", first + 1)
    return job


def tensor_group_in_host_code() -> Job:
    """Ranks 0 and 1 leave their tensor group and are then stuck in their own code, without stacks."""
    job = Job(replica=2, tensor=2, machines=one_each(4), stacks="none").steps(2)
    tensor, replica = job.along("tensor"), job.along("replica")
    for rank in range(4):
        job.enter(tensor[rank], rank)
    job.work("forward", *range(4))
    for rank in (2, 3):
        job.enter(replica[rank], rank)
    return job


def posted_early(**settings: str) -> Job:
    """Stage 1 has posted the receive of a gradient that stage 2 will send. It is not waiting for it."""
    job = Job(pipeline=3, **settings).steps(2).send(0, 1).receive(1, 0)
    return job.receive(1, 2, posted=True).receive(2, 1)


def with_devices(count: int = 4) -> Job:
    """Devices run the operations, as over NCCL, while hosts run ahead to wherever their stacks show them."""
    job = replicas(count)
    return job.devices_follow(*range(count))


def device_victim() -> Job:
    """The device of rank 3 never comes to its tensor group's operation, and that of rank 2 waits there."""
    job = four_by_two().devices_follow(*range(8))
    tensor, replica = job.along("tensor"), job.along("replica")
    for rank in range(8):
        job.enter(tensor[rank], rank).enter(replica[rank], rank)
    job.devices_follow(*job.all_but(2, 3)).device_enters(2, tensor[2], 1)
    job.device_enters(2, replica[2], 0).device_enters(3, tensor[3], 0).device_enters(3, replica[3], 0)
    return job.work("idle", *range(8))


def devices_in_opposite_order() -> Job:
    job = Job(replica=2, machines=one_each(2)).steps(2).group("first", 0, 1).group("second", 0, 1)
    for rank, order in ((0, ("first", "second")), (1, ("second", "first"))):
        job.enter(order[0], rank).enter(order[1], rank).devices_follow(rank).device_enters(rank, order[1], 0)
    return job.work("idle", 0, 1)


def inside_graphs() -> Job:
    """The gradients' all-reduce is in a CUDA graph, so that hosts publish steps, and no operation."""
    job = with_devices().capture_graph(*EVERYBODY).work("idle", *EVERYBODY)
    return job.work("idle", 0, 1, 3)


def host_checks_beside_a_stuck_device() -> Job:
    """All ranks have issued an operation that the device of rank 2 never comes to. Then 0 and 1 wait for 2
    and 3 on their hosts, in a group that uses no devices."""
    job = with_devices().enter("world", *EVERYBODY).devices_follow(0, 1, 3).work("idle", *EVERYBODY)
    return job.group("checks", *EVERYBODY).enter("checks", 0, 1)


def couple_that_posted_more(**settings: str) -> Job:
    """Ranks 0 and 1 wait for what they have posted together; each has sent or received something since."""
    job = Job(replica=4, **settings).group("couple", 0, 1).steps(2).post("couple", 0, 1)
    for first, second in ((0, 2), (1, 3)):
        job.send(first, second, posted=True).receive(second, first)
    return job.work("optimizer", *EVERYBODY).stack(0, "waits").stack(1, "waits")


def many_messages() -> Job:
    """Rank 0 has sent 1,024 messages, each with a tag of its own, before the group is first used."""
    job = Job(replica=4, machines=one_each(4), stacks="shown").steps(2)
    for tag in range(1023):
        peer = 1 + tag % 3
        job.send(0, peer, tag=tag).receive(peer, 0, tag=tag)
    return job.group("gradients", *EVERYBODY)


ROWS = [
    # One rank is late.
    Row(
        "a rank sleeps in its input while the others wait for it",
        given=replicas().enter("world", 0, 1, 3).work("input", 2).ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "a rank is stuck in its own code",
        given=replicas().enter("world", 0, 1, 3).work("forward", 2).ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "a rank has left the training loop while the others still need it",
        given=replicas().enter("world", 0, 1, 3).close(2).ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "a rank holds the interpreter's lock right after an all-reduce that all others have left",
        given=replicas()
        .enter("world", *EVERYBODY)
        .no_stack(3)
        .work("forward", 0, 1, 2)
        .enter("world", 0, 1, 2)
        .ask(),
        must_come=[hang([3], "rank", "restart")],
    ),
    Row(
        "a rank is stopped inside an operation that another one has not entered: neither excuses the other",
        given=replicas(machines=one_each(4)).enter("world", 0, 1, 3).work("input", 2).stop(1).ask(),
        must_come=[hang([1, 2], "rank", "restart")],
        never=[0, 3],
    ),
    Row(
        "a rank is stopped by a signal",
        given=replicas().enter("world", 0, 2, 3).stop(1).ask(),
        must_come=[hang([1], "rank", "restart")],
    ),
    Row(
        "a rank is stopped, and its stack looks like a wait",
        given=replicas().enter("world", 0, 2, 3).work("forward", 1).stack(1, "waits").stop(1).ask(),
        must_come=[hang([1], "rank", "restart")],
    ),
    Row(
        "a rank never enters the all-gather of its shards, and the other replica waits as well",
        given=sharded().ask(),
        must_come=[hang([6], "rank", "restart")],
    ),
    Row(
        "a rank is late for its tensor group, and three replicas wait for its neighbour there",
        given=tensor_then_replica(late=4).ask(),
        must_come=[hang([4], "rank", "restart")],
    ),
    Row(
        "gradients are reduced in the background, and the wait for them comes later",
        given=replicas(stacks="shown")
        .post("world", 0, 1, 3)
        .work("backward", 0, 1, 3)
        .stack(0, "waits")
        .stack(1, "waits")
        .stack(3, "waits")
        .work("input", 2)
        .ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "two ranks on two machines are late",
        given=replicas().enter("world", 0, 3).work("input", 1, 2).ask(),
        must_come=[hang([1, 2], "rank", "restart")],
    ),
    Row(
        "both ranks of a machine are late: the machine is to be looked at",
        given=replicas().enter("world", 0, 1).work("input", 2, 3).ask(),
        must_come=[hang([2, 3], "machine", "restart")],
    ),
    Row(
        "one rank is ahead of all others: they are late, though they are the majority",
        given=replicas(machines=one_each(4)).enter("world", 3).work("input", 0, 1, 2).ask(),
        must_come=[hang([0, 1, 2], "rank", "restart")],
    ),
    # A chain of stages.
    Row(
        "a stage posts a receive early and then sleeps, as its stack shows",
        given=posted_early(stacks="shown").stack(1, "works").ask(),
        must_come=[hang([1], "rank", "restart")],
    ),
    Row(
        "a stage posts a receive early, begins its forward pass, and sleeps in it",
        given=posted_early(stacks="none").work("forward", 1).ask(),
        must_come=[hang([1], "rank", "restart")],
    ),
    Row(
        "a rank that may wait for the late one, without a stack, is not named in its place",
        given=Job(replica=3, stacks="none")
        .group("a", 1, 2)
        .group("b", 0, 1)
        .steps(2)
        .post("a", 1)
        .work("forward", 1)
        .enter("b", 0)
        .work("input", 2)
        .ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "a stage waits for the previous one on a Python event that C++ sets",
        given=Job(pipeline=3)
        .steps(2)
        .receive(1, 0)
        .stack(1, "/usr/lib/python3.11/threading.py wait", "/home/me/train.py next_microbatch")
        .receive(2, 1)
        .work("input", 0)
        .ask(),
        must_come=[hang([0], "rank", "restart")],
        never=[1, 2],
    ),
    Row(
        "a rank waits for any message of a batch, the last of which is answered, without stacks",
        given=Job(pipeline=3, stacks="none")
        .group("tied", 1, 2)
        .steps(2)
        .receive(1, 0)
        .receive(1, 2)
        .send(2, 1)
        .enter("tied", 2)
        .work("input", 0)
        .ask(),
        must_come=[hang([0], "rank", "restart")],
    ),
    # Silence that is no hang.
    Row(
        "what ranks have only posted holds nobody up, and no stack shows a wait",
        given=replicas(stacks="none").post("world", 0, 1, 3).work("evaluation", *EVERYBODY).ask(),
        must_come=[],
    ),
    Row(
        "all ranks evaluate, and nobody waits for anybody",
        given=replicas().work("evaluation", *EVERYBODY).ask(),
        must_come=[],
    ),
    Row(
        "a stopped rank that nobody waits for",
        given=replicas().work("forward", *EVERYBODY).stop(3).ask(),
        must_come=[],
    ),
    Row(
        "the script said that silence means nothing now",
        given=replicas().enter("world", 0, 1, 3).work("idle", 2).pause(2).ask(),
        must_come=[],
    ),
    Row(
        "a rank has been writing a checkpoint for 20 s of its 600 s",
        given=replicas().enter("world", 0, 1, 3).work("checkpoint write", 2).ask(20),
        must_come=[],
    ),
    Row(
        "a rank has been writing a checkpoint for 700 s",
        given=replicas().enter("world", 0, 1, 3).work("checkpoint write", 2).ask(700),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "the library is about to end the ranks that wait for a checkpoint: its writer is named before",
        given=Job(replica=4, machines=two_each(4))
        .group("world", *EVERYBODY, timeout=60)
        .steps(3)
        .enter("world", 0, 1, 3)
        .work("checkpoint write", 2)
        .ask(55),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "a rank is late, and another one is writing a checkpoint",
        given=replicas().work("checkpoint write", 2).seconds(14).enter("world", 0, 3).work("input", 1).ask(),
        must_come=[hang([1], "rank", "restart")],
        never=[0, 2, 3],
    ),
    Row(
        "a rank is late in the second step, whose predecessor took a second",
        given=Job(replica=4, machines=two_each(4)).steps(1).enter("world", 0, 1, 3).work("input", 2).ask(30),
        must_come=[hang([2], "rank", "restart")],
    ),
    # Somebody moves.
    Row(
        "the rank that all others wait for has just begun another layer",
        given=replicas().enter("world", 1, 2, 3).seconds(6).work("forward", 0).ask(0),
        must_come=[],
    ),
    Row(
        "a rank evaluates alone and moves all the time; the others are asked for the second time",
        given=replicas()
        .enter("world", 1, 2, 3)
        .seconds(6)
        .work("forward", 0)
        .ask(0)
        .seconds(10)
        .work("forward", 0)
        .ask(0),
        must_come=[],
        never=EVERYBODY,
    ),
    # Nobody is late.
    Row(
        "two ranks enter two groups in opposite order, and two more wait for them",
        given=Job(replica=4).group("couple", 0, 1).steps(2).enter("world", 0, 2, 3).enter("couple", 1).ask(),
        must_come=[hang([0, 1], "process group", "restart")],
    ),
    Row(
        "everybody waits for everybody, and one entered another group than all others",
        given=replicas(8)
        .group("checks", *range(8))
        .enter("world", *range(6), 7)
        .enter("checks", 6, operation=BARRIER)
        .ask(),
        must_come=[hang([6], "rank", "restart")],
    ),
    Row(
        "a rank leaves an operation of its pair out: its neighbour waits for it there, and is not named",
        given=left_out_of_a_pair().ask(),
        must_come=either([hang([1, 3, 5, 6, 7], "process group", "restart")], [hang([6], "rank", "restart")]),
        never=[7],
    ),
    Row(
        "a program enters its pairs in opposite order everywhere",
        given=pairs_in_opposite_order().ask(),
        must_come=[hang(range(8), "process group", "restart")],
    ),
    Row(
        "a tensor group does not return from an operation, and all other replicas wait for it",
        given=tensor_group_that_stalls().ask(),
        must_come=stuck([4, 5]),
    ),
    Row(
        "all ranks have entered one all-reduce",
        given=replicas().enter("world", *EVERYBODY).ask(),
        must_come=stuck(EVERYBODY),
    ),
    Row(
        "all groups stand still at once",
        given=all_replica_groups_that_stall().ask(),
        must_come=stuck(range(8), "job"),
    ),
    Row(
        "a message that was sent never arrives",
        given=Job(pipeline=4, stacks="shown")
        .steps(2)
        .send(1, 2, posted=True)
        .work("forward", 1)
        .receive(2, 1)
        .receive(3, 2)
        .ask(),
        must_come=stuck([1, 2]),
    ),
    Row(
        "a receive that was posted early makes no cycle of a group that does not return",
        given=Job(replica=3)
        .group("couple", 0, 1)
        .steps(2)
        .receive(0, 2, posted=True)
        .enter("couple", 0, 1)
        .receive(2, 0)
        .ask(),
        must_come=stuck([0, 1]),
    ),
    Row(
        "two ranks do not return from what they have posted, and each has exchanged a message since",
        given=couple_that_posted_more().ask(),
        must_come=stuck([0, 1]),
    ),
    Row(
        "two ranks have posted something together, and show no stacks; a third waits for both",
        given=Job(replica=3)
        .group("couple", 0, 1)
        .group("a", 0, 2)
        .group("b", 1, 2)
        .steps(2)
        .post("couple", 0, 1)
        .work("optimizer", 0, 1)
        .no_stack(0, 1)
        .post("a", 2)
        .post("b", 2)
        .stack(2, "waits")
        .ask(),
        must_come=either(*stuck([0, 1]).answers, [hang([0, 1], "process group", "restart")]),
    ),
    Row(
        "both ranks of a tensor group are stuck in their own code after its last operation, without stacks",
        given=tensor_group_in_host_code().ask(),
        must_come=either([hang([0, 1], "rank", "restart")], [hang([0, 1], "process group", "restart")]),
    ),
    # Devices run the operations, and hosts run ahead.
    Row(
        "over NCCL, the host of a rank is late",
        given=with_devices()
        .enter("world", 0, 1, 3)
        .devices_follow(*EVERYBODY)
        .work("idle", *EVERYBODY)
        .ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "the device of a rank is stuck, though its host ran ahead with all others",
        given=with_devices()
        .enter("world", *EVERYBODY)
        .devices_follow(0, 1, 3)
        .enter("world", *EVERYBODY)
        .devices_finish(6, *EVERYBODY)
        .work("idle", *EVERYBODY)
        .ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "one device has finished fewer steps than the others",
        given=replicas().enter("world", *EVERYBODY).devices_finish(12, 0, 1, 3).devices_finish(11, 2).ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "one device has finished more steps than the others: it blames nobody",
        given=replicas().enter("world", *EVERYBODY).devices_finish(11, 0, 1, 2).devices_finish(12, 3).ask(),
        must_come=stuck(EVERYBODY),
    ),
    Row(
        "the device of a rank waits for that of its neighbour, and three replicas for both",
        given=device_victim().ask(),
        must_come=[hang([3], "rank", "restart")],
    ),
    Row(
        "all devices are in the same operation and have work left",
        given=with_devices()
        .enter("world", *EVERYBODY)
        .devices_follow(*EVERYBODY)
        .work("idle", *EVERYBODY)
        .devices_busy(*EVERYBODY)
        .ask(),
        must_come=stuck(EVERYBODY),
    ),
    Row(
        "all devices have finished what they had, and hosts are silent",
        given=with_devices().work("idle", *EVERYBODY).ask(),
        must_come=[],
    ),
    Row(
        "two devices wait for each other in operations issued in opposite order",
        given=devices_in_opposite_order().ask(),
        must_come=[hang([0, 1], "process group", "restart")],
    ),
    Row(
        "a device is stuck, and two hosts wait for its rank in a group that uses no devices",
        given=host_checks_beside_a_stuck_device().ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "nothing is known of the device of the rank whose host seems late",
        given=replicas().enter("world", 0, 1, 3).work("input", 2).devices_finish(12, 0, 1, 3).ask(),
        must_come=[hang(EVERYBODY, "process group", "restart")],
    ),
    # What is not observed.
    Row(
        "three devices wait in a CUDA graph; the fourth is idle, and its host is behind",
        given=inside_graphs().devices_busy(0, 1, 3).devices_idle(2).ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "the same, and the graph was captured before anybody looked",
        given=with_devices()
        .work("idle", *EVERYBODY)
        .work("idle", 0, 1, 3)
        .devices_busy(0, 1, 3)
        .devices_idle(2)
        .ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "all devices wait in a CUDA graph",
        given=inside_graphs().devices_busy(*EVERYBODY).ask(),
        must_come=stuck(EVERYBODY, "job"),
    ),
    Row(
        "the device of a rank waits in a CUDA graph for the late rank, and the others wait for both",
        given=with_devices()
        .capture_graph(0)
        .enter("world", 1, 2)
        .devices_follow(1, 2)
        .work("idle", 0)
        .work("input", 3)
        .devices_busy(0, 1, 2)
        .devices_idle(3)
        .ask(),
        must_come=either([hang([3], "rank", "restart")], [hang(EVERYBODY, "process group", "restart")]),
        never=[0, 1, 2],
    ),
    Row(
        "a rank waits in its backward pass for the late one, in a group for which its record had no room",
        given=many_messages().enter("gradients", 0, 1, 2).stack(0, "unclear").work("input", 3).ask(),
        must_come=either([hang([3], "rank", "restart")], [hang(EVERYBODY, "process group", "restart")]),
        never=[0, 1, 2],
    ),
    Row(
        "all ranks have entered one all-reduce, and an error of our own has ended the record of one",
        given=replicas().miss_operations(0).steps(2).enter("world", *EVERYBODY).stack(0, "unclear").ask(),
        must_come=stuck(EVERYBODY),
        never=EVERYBODY,
    ),
    Row(
        "a rank is late after the library refused one of its operations: it had never begun",
        given=replicas(stacks="shown")
        .refused("world", 3)
        .steps(2)
        .enter("world", 0, 1, 2)
        .work("input", 3)
        .ask(),
        must_come=[hang([3], "rank", "restart")],
        never=[0, 1, 2],
    ),
    Row(
        "all ranks have entered one all-reduce, without stacks; one rank had been refused an earlier one",
        given=replicas(stacks="none").refused("world", 3).steps(2).enter("world", *EVERYBODY).ask(),
        must_come=stuck(EVERYBODY),
        never=EVERYBODY,
    ),
]


@pytest.mark.parametrize("row", cases(ROWS))
def test_hangs(row: Row):
    *on_the_way, answer = rounds.conclusions(row.given)
    check(row, answer, on_the_way=on_the_way)


class Silence(NamedTuple):
    """A trainer finishes steps that take so many seconds, and publishes nothing in the next one."""

    steps: Sequence[float]
    phase: str = "forward"
    paused: bool = False
    round_in_step: int | None = None
    """There was a round in this step, so that it hung."""


STEADY = [1.0] * 19

PATIENCE = [
    Row("steps of a second", given=Silence(STEADY), must_come=5),
    Row("steps of 4 s", given=Silence([4.0] * 19), must_come=12),
    Row("one of the timed steps took 4 s", given=Silence([*STEADY, 4.0]), must_come=12),
    Row("the first step, which compiles and connects", given=Silence([], "start"), must_come=600),
    Row(
        "the second step, after a first one of a second",
        given=Silence([1.0]),
        must_come=5,
    ),
    Row("the input of an ordinary step", given=Silence(STEADY, "input"), must_come=5),
    Row("a checkpoint is written", given=Silence(STEADY, "checkpoint write"), must_come=600),
    Row("an evaluation that is marked", given=Silence(STEADY, "evaluation"), must_come=600),
    Row("the script said that silence means nothing", given=Silence(STEADY, paused=True), must_come=None),
    Row(
        "a step of 300 s without a round is what steps take here",
        given=Silence([*STEADY, 300.0]),
        must_come=900,
    ),
    Row(
        "a step of 300 s hung, and hides no later hang",
        given=Silence([*STEADY, 300.0], round_in_step=20),
        must_come=5,
    ),
]


@pytest.mark.parametrize("row", cases(PATIENCE))
def test_how_many_seconds_of_silence_are_left_alone(row: Row):
    check(row, rounds.patience(row.given))
