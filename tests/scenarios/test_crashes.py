"""A trainer ended before it had finished: who ended of itself, and who only because of that."""

from __future__ import annotations

import pytest

from tests.scenarios.paper import Job, one_each, replicas, two_each
from tests.scenarios.rows import Either, Row, cases, check, crash, either, hang
from tests.scenarios.today import rounds

EVERYBODY = (0, 1, 2, 3)


def on_one_machine(*ranks: int) -> Either:
    """All trainers of a machine ended: the machine is to be looked at, or replaced."""
    return either(*([crash(ranks, "machine", action)] for action in ("inspect", "preflight", "replace")))


def waiting_for(late: int, phase: str = "forward") -> Job:
    job = replicas().work(phase, late)
    return job.enter("world", *job.all_but(late))


def waiting_along_a_tensor_group(late: int) -> Job:
    job = Job(replica=4, tensor=2, machines=two_each(8)).steps(2)
    tensor, replica = job.along("tensor"), job.along("replica")
    for rank in job.all_but(late):
        job.enter(tensor[rank], rank)
    for rank in job.all_but(*job.members(tensor[late])):
        job.enter(replica[rank], rank)
    return job.work("input", late)


def chain_of_devices() -> Job:
    """Over NCCL, hosts have issued everything. The device of rank 5 waits for rank 4, and that of rank 1 for
    rank 5."""
    job = Job(replica=4, tensor=2, machines=two_each(8)).steps(2)
    tensor, replica = job.along("tensor"), job.along("replica")
    for rank in range(8):
        job.enter(tensor[rank], rank).enter(replica[rank], rank)
    for rank in range(8):
        job.device_enters(rank, tensor[rank], int(rank != 4))
        job.device_enters(rank, replica[rank], int(rank not in (4, 5)))
    return job.devices_busy(*range(8)).work("idle", *range(8))


def with_a_timeout_of(seconds: float) -> Job:
    return Job(replica=4, machines=two_each(4)).group("world", *EVERYBODY, timeout=seconds).steps(3)


def after_a_hang_that_is_over() -> Job:
    """Rank 2 slept for 9 s, was named, and went on; since then there were 80 steps within a second."""
    job = replicas().enter("world", 0, 1, 3).work("input", 2).ask(6).seconds(3)
    return job.enter("world", 2).finish_step().steps(80).seconds(0.8).work("forward", *EVERYBODY)


ROWS = [
    # One ends.
    Row(
        "a rank is killed while all others go on",
        given=replicas().work("forward", *EVERYBODY).end("killed", 1).ask(0.1),
        must_come=[crash([1], "rank", "restart")],
    ),
    Row(
        "a rank fails with an exception, and the others wait for it",
        given=waiting_for(2).end("failed", 2).ask(),
        must_come=[crash([2], "rank", "restart")],
    ),
    Row(
        "a rank is terminated while all others wait for it",
        given=waiting_for(2).end("asked", 2).ask(),
        must_come=[crash([2], "rank", "restart")],
    ),
    # A launcher asks all of them to end, which is no crash.
    Row(
        "all ranks are asked to end, one after the other, and one of them only after the others were heard",
        given=replicas().work("forward", *EVERYBODY).end("asked", 0, 1, 3).ask(0.1).end("asked", 2).ask(0.5),
        must_come=[],
        never=EVERYBODY,
    ),
    Row(
        "the same in the middle of a long operation",
        given=replicas()
        .enter("world", *EVERYBODY)
        .seconds(60)
        .end("asked", 0, 1, 3)
        .ask(0.1)
        .end("asked", 2)
        .ask(0.5),
        must_come=[],
        never=EVERYBODY,
    ),
    Row(
        "all ranks of a job that has hung for an hour are asked to end",
        given=waiting_for(2).seconds(3600).end("asked", *EVERYBODY).ask(0.5),
        must_come=[],
    ),
    Row(
        "two ranks are asked to end three seconds apart, and the others wait for them by then",
        given=waiting_for(2).end("asked", 2).seconds(3).end("asked", 0).ask(0.1),
        must_come=[],
        never=EVERYBODY,
    ),
    # What ends them is something else.
    Row(
        "a rank ends inside the operation that all have entered",
        given=replicas().enter("world", *EVERYBODY).end("failed", 2).ask(),
        must_come=[crash([2], "rank", "restart")],
    ),
    Row(
        "a rank issues operations ahead of the others, and ends",
        given=replicas().enter("world", *EVERYBODY).post("world", 3).post("world", 3).end("killed", 3).ask(),
        must_come=[crash([3], "rank", "restart")],
    ),
    Row(
        "the only trainer of a machine ends: its observer answers, so the machine is there",
        given=replicas(machines=one_each(4)).enter("world", 0, 1, 3).end("failed", 2).ask(),
        must_come=[crash([2], "rank", "restart")],
    ),
    Row(
        "a rank is killed while another one is late",
        given=replicas(machines=one_each(4))
        .enter("world", 0, 1)
        .work("input", 3)
        .seconds(6)
        .end("killed", 2)
        .ask(3),
        must_come=either(
            [crash([2], "rank", "restart")],
            [crash([2], "rank", "restart"), hang([3], "rank", "restart")],
            [hang([2, 3], "rank", "restart")],
        ),
        never=[0, 1],
    ),
    Row(
        "nothing is known of the device of a rank that was killed, and the others wait for it",
        given=replicas().enter("world", 0, 1, 3).devices_finish(12, 0, 1, 3).end("killed", 2).ask(),
        must_come=[crash([2], "rank", "restart")],
    ),
    # One ends, and others because of it.
    Row(
        "a rank fails in its input, its tensor neighbour waiting for it, and everybody waiting for that one",
        given=waiting_along_a_tensor_group(4).seconds(1).end("failed", *range(8)).ask(),
        must_come=[crash([4], "rank", "restart")],
    ),
    Row(
        "the launcher ends all others soon after one has failed",
        given=waiting_for(2).end("failed", 2).seconds(0.1).end("asked", 0, 1, 3).ask(0.5),
        must_come=[crash([2], "rank", "restart")],
    ),
    Row(
        "a rank is killed, and those that lose their connection fail within milliseconds",
        given=waiting_for(1).seconds(1).end("failed", 0, 2).end("killed", 1).ask(0.1),
        must_come=[crash([1], "rank", "restart")],
    ),
    Row(
        "a rank is killed, another one fails because of it, and the other's observer answers 0.1 s late",
        given=waiting_for(0)
        .seconds(1)
        .end("killed", 0)
        .seconds(0.05)
        .end("failed", 1)
        .answer_late(1, 0.1)
        .ask(0.5),
        must_come=[crash([0], "rank", "restart")],
        never=[1, 2, 3],
    ),
    Row(
        "the end of a killed rank is seen half a second after its peer has failed because of it",
        given=waiting_for(0).seconds(1).end("failed", 1).seconds(0.5).end("killed", 0).ask(0.5),
        must_come=[crash([0], "rank", "restart")],
        never=[1, 2, 3],
    ),
    Row(
        "a rank is killed; those that have posted an operation go on, and are seen to fail before it",
        given=replicas()
        .work("input", 2)
        .post("world", 0, 1, 3)
        .work("backward", 0, 1, 3)
        .end("failed", 0)
        .seconds(0.1)
        .end("failed", 1, 3)
        .end("killed", 2)
        .ask(0.1),
        must_come=[crash([2], "rank", "restart")],
        never=[0, 1, 3],
    ),
    Row(
        "a rank fails in its input while an operation of it is under way, and another one is killed that has "
        "entered it",
        given=replicas()
        .post("world", *EVERYBODY)
        .work("input", 0)
        .end("failed", 0)
        .seconds(2.0)
        .end("killed", 2)
        .ask(0.1),
        must_come=[crash([0], "rank", "restart")],
        never=[1, 3],
    ),
    Row(
        "nobody knows how a rank ended; another one ended in an operation that the first had not entered",
        given=waiting_for(0)
        .seconds(1)
        .end("unknown", 0)
        .seconds(0.05)
        .end("failed", 1)
        .answer_late(1, 0.1)
        .ask(0.5),
        must_come=[crash([0], "rank", "restart")],
        never=[1, 2, 3],
    ),
    Row(
        "a rank leaves because the job restarts, and others fail as they lose it",
        given=replicas()
        .work("forward", *EVERYBODY)
        .leave_for_restart(1)
        .seconds(0.3)
        .end("failed", 0)
        .work("forward", 2, 3)
        .ask(0.1),
        must_come=[],
    ),
    Row(
        "a rank is killed, and the others, which the launcher ends because of that, are seen to end before",
        given=replicas()
        .work("forward", *EVERYBODY)
        .end("asked", 0, 2, 3)
        .seconds(0.3)
        .end("killed", 1)
        .ask(0.1),
        must_come=[crash([1], "rank", "restart")],
        never=[0, 2, 3],
    ),
    Row(
        "a rank fails, and the others, which the launcher ends because of that, are seen to end before",
        given=replicas()
        .work("forward", *EVERYBODY)
        .end("asked", 0, 2, 3)
        .seconds(0.3)
        .end("failed", 1)
        .ask(0.1),
        must_come=[crash([1], "rank", "restart")],
        never=[0, 2, 3],
    ),
    Row(
        "over NCCL a rank fails, and those that wait for it one after the other are seen to fail before",
        given=chain_of_devices()
        .end("failed", 1)
        .seconds(0.1)
        .end("failed", 5)
        .seconds(0.1)
        .end("failed", 4)
        .ask(0.1),
        must_come=[crash([4], "rank", "restart")],
        never=[0, 1, 2, 3, 5, 6, 7],
    ),
    # Several end.
    Row(
        "two ranks of two machines are killed together",
        given=replicas().work("forward", *EVERYBODY).end("killed", 1, 2).ask(0.1),
        must_come=[crash([1, 2], "rank", "restart")],
    ),
    Row(
        "both ranks of a machine are killed together while the others go on",
        given=replicas().work("forward", *EVERYBODY).end("killed", 2, 3).ask(0.1),
        must_come=on_one_machine(2, 3),
    ),
    Row(
        "both ranks of a machine have ended, and all others wait for them",
        given=replicas().enter("world", 0, 1).end("failed", 2, 3).ask(),
        must_come=on_one_machine(2, 3),
    ),
    Row(
        "all ranks fail together",
        given=replicas().work("forward", *EVERYBODY).end("failed", *EVERYBODY).ask(0.5),
        must_come=[crash(EVERYBODY, "job", "restart")],
    ),
    Row(
        "all ranks are killed within half a second, and of one nobody knows how it ended",
        given=replicas()
        .work("forward", *EVERYBODY)
        .end("killed", 1)
        .seconds(0.2)
        .end("killed", 0)
        .end("unknown", 3)
        .seconds(0.3)
        .end("killed", 2)
        .ask(0.1),
        must_come=[crash(EVERYBODY, "job", "restart")],
    ),
    Row(
        "all ranks are killed within half a second, two of them while they wait for the others",
        given=replicas()
        .enter("world", 0, 1)
        .work("forward", 2, 3)
        .end("killed", 0)
        .seconds(0.2)
        .end("killed", 1, 2)
        .seconds(0.2)
        .end("killed", 3)
        .ask(0.1),
        must_come=[crash(EVERYBODY, "job", "restart")],
    ),
    Row(
        "all ranks are killed together, and one of them looks alive while its memory is freed",
        given=replicas()
        .work("forward", *EVERYBODY)
        .end("killed", 0, 1, 2)
        .ask(0.05)
        .end("killed", 3)
        .ask(0.5),
        must_come=[crash(EVERYBODY, "job", "restart")],
    ),
    Row(
        "both ranks of a machine are killed half a second apart, and a rank elsewhere fails meanwhile",
        given=replicas()
        .enter("world", 0, 1)
        .work("input", 2, 3)
        .end("killed", 2)
        .seconds(0.2)
        .end("failed", 0)
        .seconds(0.3)
        .end("killed", 3)
        .ask(0.1),
        must_come=on_one_machine(2, 3),
        never=[0, 1],
    ),
    Row(
        "a rank is killed, and its launcher kills all others 30 s later",
        given=replicas().enter("world", 0, 2, 3).end("killed", 1).seconds(30).end("killed", 0, 2, 3).ask(0.1),
        must_come=[crash([1], "rank", "restart")],
        never=[0, 2, 3],
    ),
    Row(
        "a rank fails with an exception, and a launcher kills all others half a second later",
        given=replicas()
        .work("forward", *EVERYBODY)
        .end("failed", 0)
        .seconds(0.5)
        .end("killed", 1, 2, 3)
        .ask(0.1),
        must_come=[crash([0], "rank", "restart")],
        never=[1, 2, 3],
    ),
    Row(
        "a rank is killed, and half a second later others end, nobody knows how",
        given=waiting_for(1).end("killed", 1).seconds(0.5).end("unknown", 0, 2, 3).ask(0.1),
        must_come=[crash([1], "rank", "restart")],
        never=[0, 2, 3],
    ),
    # The library ends ranks that wait, not the one that they wait for.
    Row(
        "a timeout ends two of the ranks that wait for a late one",
        given=with_a_timeout_of(60)
        .enter("world", 0, 1, 3)
        .work("input", 2)
        .seconds(60)
        .end("failed", 0, 1)
        .ask(0.5),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "a rank fails inside an operation that misses others, and then the launcher ends those that work",
        given=replicas()
        .enter("world", 1)
        .work("forward", 0, 2, 3)
        .end("failed", 1)
        .seconds(1)
        .end("asked", 0, 2, 3)
        .ask(0.5),
        must_come=[crash([1], "rank", "restart")],
    ),
    Row(
        "over NCCL, a timeout aborts what two ranks wait for, their devices go on, and then they are ended",
        given=with_a_timeout_of(60)
        .devices_follow(*EVERYBODY)
        .enter("world", 0, 1, 3)
        .devices_follow(0, 1, 3)
        .enter("world", 0, 1, 3)
        .work("idle", *EVERYBODY)
        .seconds(60)
        .devices_follow(0, 1)
        .seconds(0.3)
        .end("failed", 0, 1)
        .ask(0.5),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "a timeout ends the ranks that have waited only after the late one has come",
        given=with_a_timeout_of(60)
        .enter("world", 0, 1, 3)
        .work("input", 2)
        .seconds(60)
        .enter("world", 2)
        .enter("world", *EVERYBODY)
        .seconds(0.5)
        .end("failed", 0, 1)
        .ask(0.2),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "the same, and they have waited for two more seconds since the late one has come",
        given=with_a_timeout_of(60)
        .enter("world", 0, 1, 3)
        .work("input", 2)
        .seconds(60)
        .enter("world", 2)
        .enter("world", *EVERYBODY)
        .seconds(2)
        .end("failed", 0, 1)
        .ask(0.2),
        must_come=[hang([2], "rank", "restart")],
        never=[0, 1, 3],
    ),
    Row(
        "a timeout of 4 s, less than any silence that is reported, ends two of the ranks that wait",
        given=with_a_timeout_of(4)
        .enter("world", 0, 1, 3)
        .work("input", 2)
        .seconds(4)
        .end("failed", 0, 1)
        .ask(0.5),
        must_come=[hang([2], "rank", "restart")],
        never=[0, 1, 3],
    ),
    Row(
        "a timeout of 6 s ends three ranks that wait, one of which has come 3 s after the others",
        given=with_a_timeout_of(6)
        .enter("world", 0, 1)
        .work("input", 2)
        .seconds(3)
        .enter("world", 3)
        .seconds(3)
        .end("failed", 0, 1, 3)
        .ask(0.5),
        must_come=[hang([2], "rank", "restart")],
        never=[0, 1, 3],
    ),
    Row(
        "a rank ends after a long silence of its own",
        given=with_a_timeout_of(60)
        .enter("world", 0, 1, 3)
        .work("input", 2)
        .seconds(30)
        .end("failed", 2)
        .ask(0.5),
        must_come=[crash([2], "rank", "restart")],
    ),
    Row(
        "a timeout ends all ranks, which have all entered the operation",
        given=with_a_timeout_of(60).enter("world", *EVERYBODY).seconds(60).end("failed", *EVERYBODY).ask(0.5),
        must_come=[crash(EVERYBODY, "job", "restart")],
    ),
    # After something else.
    Row(
        "a rank is killed a second after another one's hang is over",
        given=after_a_hang_that_is_over().enter("world", 0, 2, 3).end("killed", 1).ask(0.5),
        must_come=[crash([1], "rank", "restart")],
        never=[0, 3],
    ),
    Row(
        "a rank is killed a second after its own hang is over",
        given=after_a_hang_that_is_over().enter("world", 0, 1, 3).end("killed", 2).ask(0.5),
        must_come=[crash([2], "rank", "restart")],
    ),
    Row(
        "a rank is killed a second after another one's hang is over, and two fail because of it",
        given=after_a_hang_that_is_over()
        .enter("world", 0, 2, 3)
        .end("killed", 1)
        .end("failed", 0, 3)
        .ask(0.5),
        must_come=[crash([1], "rank", "restart")],
        never=[0, 3],
    ),
]


@pytest.mark.parametrize("row", cases(ROWS))
def test_crashes(row: Row):
    *on_the_way, answer = rounds.conclusions(row.given)
    check(row, answer, on_the_way=on_the_way)
