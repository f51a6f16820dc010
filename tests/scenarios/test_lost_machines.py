"""Observers that do not answer: what is lost with them, and what is only not known.

One round without an answer proves little: an observer that died is started again, and one on a busy machine
is late. So an absence counts once it is confirmed, in a second round at least 3 s later, and by what the
connection says: ``silent`` if the machine or the path to it is lost, ``closed`` if the machine is up and only
the process is gone. A lost machine is replaced. A rank that is late beside it is a finding of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.scenarios.paper import Job, one_each, replicas, two_each
from tests.scenarios.rows import Either, Row, cases, check, crash, either, hang, lost
from tests.scenarios.today import rounds

EVERYBODY = (0, 1, 2, 3)


def not_known(*members: int) -> Either:
    """These wait for each other, and it is not known whether an absent one among them is the cause."""
    return either(
        *([hang(members, "process group", action)] for action in ("inspect", "preflight", "restart"))
    )


def nobody_yet(*members: int) -> Either:
    """Nothing is said before the absence is confirmed, or nobody is named."""
    return either([], *not_known(*members).answers)


def confirmed(job: Job) -> Job:
    return job.ask().ask(3.5)


def of_four_ranks(*, waiting: Sequence[int]) -> Job:
    """4 machines of 4 ranks, a replica each, of which the second is lost. Some ranks wait for its ranks."""
    job = Job(replica=4, tensor=4, machines=[f"machine {rank // 4}" for rank in range(16)]).steps(2)
    replica = job.along("replica")
    for rank in job.all_but(4, 5, 6, 7):
        if rank % 4 in waiting:
            job.enter(replica[rank], rank)
        else:
            job.work("forward", rank)
    return job.no_answer(4, 5, 6, 7)


def absent_in_a_tensor_group() -> Job:
    """Rank 5 waits for its neighbour 4, and the other replicas for rank 5 and for rank 4."""
    job = Job(replica=4, tensor=2).steps(2)
    tensor, replica = job.along("tensor"), job.along("replica")
    for rank in job.all_but(4):
        job.enter(tensor[rank], rank)
    for rank in job.all_but(4, 5):
        job.enter(replica[rank], rank)
    return job.no_answer(4)


def cut_in_two(*answering: int) -> Job:
    job = replicas(6).enter("world", *range(6))
    return job.no_answer(*job.all_but(*answering))


ROWS = [
    # A machine is lost.
    Row(
        "nobody answers from one of three machines, and the path to it stays silent",
        given=confirmed(replicas(6).enter("world", 0, 1, 4, 5).no_answer(2, 3)),
        must_come=[lost([2, 3], "machine", "replace")],
    ),
    Row(
        "nobody answers from a machine, though only two of its four ranks are waited for so far",
        given=confirmed(of_four_ranks(waiting=[0, 1])),
        must_come=[lost([4, 5, 6, 7], "machine", "replace")],
    ),
    Row(
        "nobody answers from a machine, and trainers elsewhere fail because it is lost",
        given=confirmed(
            replicas(6).enter("world", 0, 1, 4, 5).no_answer(2, 3).seconds(1).end("failed", 0, 1, 4, 5)
        ),
        must_come=[lost([2, 3], "machine", "replace")],
    ),
    Row(
        "a machine is lost, and nobody waits for anybody",
        given=confirmed(replicas(6).work("evaluation", *range(6)).no_answer(2, 3)),
        must_come=[],
    ),
    Row(
        "the same over NCCL: idle devices wait for nobody either",
        given=confirmed(
            replicas(6)
            .devices_follow(*range(6))
            .devices_idle(*range(6))
            .work("evaluation", *range(6))
            .no_answer(2, 3)
        ),
        must_come=[],
    ),
    # It is not confirmed.
    Row(
        "both observers of a machine are late in one round; all ranks have entered the operation",
        given=replicas().enter("world", *EVERYBODY).no_answer(2, 3).ask(),
        must_come=nobody_yet(*EVERYBODY),
        never=EVERYBODY,
    ),
    Row(
        "the only observer of a machine is late in one round, and a rank elsewhere sleeps in its input",
        given=Job(replica=4, machines=one_each(4), stacks="shown")
        .steps(2)
        .enter("world", 0, 1, 2)
        .work("input", 3)
        .no_answer(2)
        .ask(),
        must_come=either([hang([3], "rank", "restart")], *nobody_yet(*EVERYBODY).answers),
        never=[0, 1, 2],
    ),
    Row(
        "the same observer answers in the second round",
        given=Job(replica=4, machines=one_each(4), stacks="shown")
        .steps(2)
        .enter("world", 0, 1, 2)
        .work("input", 3)
        .no_answer(2)
        .ask()
        .answer(2)
        .ask(3.5),
        must_come=[hang([3], "rank", "restart")],
    ),
    # It is confirmed, and something else is wrong as well.
    Row(
        "a machine of one rank stays silent, and a rank elsewhere sleeps in its input",
        given=confirmed(
            Job(replica=4, machines=one_each(4), stacks="shown")
            .steps(2)
            .enter("world", 0, 1)
            .work("input", 3)
            .no_answer(2)
        ),
        must_come=either(
            [lost([2], "machine", "replace"), hang([3], "rank", "restart")],
            [hang([3], "rank", "restart"), lost([2], "machine", "replace")],
        ),
        never=[0, 1],
    ),
    Row(
        "the same, and no stack shows who waits",
        given=confirmed(
            Job(replica=4, machines=one_each(4), stacks="none")
            .steps(2)
            .enter("world", 0, 1)
            .work("input", 3)
            .no_answer(2)
        ),
        must_come=either(
            [lost([2], "machine", "replace"), hang([3], "rank", "restart")],
            [hang([3], "rank", "restart"), lost([2], "machine", "replace")],
        ),
        never=[0, 1],
    ),
    Row(
        "the observer of a machine of one rank is gone, and its machine is up: it is not replaced",
        given=confirmed(
            replicas(machines=one_each(4)).enter("world", 0, 1, 3).no_answer(2, connection="closed")
        ),
        must_come=either([crash([2], "rank", "restart")], *not_known(*EVERYBODY).answers),
        never=[0, 1, 3],
    ),
    Row(
        "all processes of a machine of one rank are gone, and the others fail in the operation that it left",
        given=confirmed(
            replicas(machines=one_each(4))
            .enter("world", *EVERYBODY)
            .no_answer(2, connection="closed")
            .seconds(0.1)
            .end("failed", 0, 1, 3)
        ),
        must_come=[lost([2], "machine", "replace")],
    ),
    Row(
        "the observer of a machine of one rank is gone, and a timeout ends the others, which wait for it",
        given=Job(replica=4, machines=one_each(4))
        .group("world", *EVERYBODY, timeout=60)
        .steps(2)
        .enter("world", 0, 1, 3)
        .no_answer(2, connection="closed")
        .seconds(60)
        .end("failed", 0, 1, 3)
        .ask(0.5)
        .ask(3.5),
        must_come=either(
            [crash(EVERYBODY, "process group", "restart")],
            [crash([2], "rank", "restart")],
            *not_known(*EVERYBODY).answers,
        ),
        never=[0, 1, 3],
    ),
    Row(
        "the observer of a machine of one rank is gone, and another trainer fails outside of all operations",
        given=confirmed(
            replicas(machines=one_each(4))
            .enter("world", 0, 2)
            .work("forward", 1, 3)
            .no_answer(2, connection="closed")
            .seconds(0.1)
            .end("failed", 1)
        ),
        must_come=[crash([1], "rank", "restart")],
    ),
    # A rank does not answer, and its neighbour on the machine does.
    Row(
        "the observer of one rank is gone, and all others wait for that rank",
        given=confirmed(replicas().enter("world", 0, 1, 3).no_answer(2, connection="closed")),
        must_come=either(*not_known(*EVERYBODY).answers, [crash([2], "rank", "restart")]),
    ),
    Row(
        "the observer of one rank is gone, and another rank is late",
        given=confirmed(
            replicas().enter("world", 0, 1, 2).work("input", 3).no_answer(2, connection="closed")
        ),
        must_come=[hang([3], "rank", "restart")],
        never=[0, 1, 2],
    ),
    Row(
        "an observer does not answer in a job in which nobody waits",
        given=confirmed(replicas().work("evaluation", *EVERYBODY).no_answer(2)),
        must_come=[],
    ),
    Row(
        "a rank that waits for nobody has no observer any more, and a pair elsewhere does not come back",
        given=confirmed(
            replicas(machines=two_each(4))
            .group("pair", 0, 1)
            .enter("pair", 0, 1)
            .work("forward", 2, 3)
            .no_answer(3, connection="closed")
        ),
        must_come=not_known(0, 1),
    ),
    Row(
        "a pair does not come back, and the observer of one of the two does not answer",
        given=confirmed(replicas(8).group("pair", 0, 1).enter("pair", 0, 1).no_answer(1)),
        must_come=not_known(0, 1),
    ),
    Row(
        "an observer in a tensor group does not answer: its groups are listed, and not who waits for them",
        given=confirmed(absent_in_a_tensor_group()),
        must_come=not_known(0, 2, 4, 5, 6),
    ),
    # Trainers end, and one rank does not answer.
    Row(
        "a rank is lost with its observer, and the others fail in the operation that it has left",
        given=confirmed(
            replicas().enter("world", *EVERYBODY).no_answer(2, connection="closed").end("failed", 0, 1, 3)
        ),
        must_come=either([crash(EVERYBODY, "process group", "restart")], [crash([2], "rank", "restart")]),
        never=[0, 1, 3],
    ),
    Row(
        "a rank fails outside of all operations, while the observer of another one does not answer",
        given=confirmed(replicas().work("forward", *EVERYBODY).no_answer(2).seconds(1).end("failed", 1)),
        must_come=[crash([1], "rank", "restart")],
    ),
    Row(
        "a rank is killed in an operation, while the observer of another one does not answer",
        given=confirmed(replicas().enter("world", *EVERYBODY).no_answer(2).end("killed", 1)),
        must_come=[crash([1], "rank", "restart")],
    ),
    Row(
        "a rank is lost with its observer, and the launcher ends the others one after the other",
        given=confirmed(
            replicas()
            .work("forward", *EVERYBODY)
            .no_answer(2, connection="closed")
            .end("asked", 0)
            .seconds(0.2)
            .end("asked", 1, 3)
        ),
        must_come=either([crash(EVERYBODY, "process group", "restart")], [crash([2], "rank", "restart")]),
        never=[0, 1, 3],
    ),
    Row(
        "a rank is killed, its observer answers late, and the launcher has ended another one meanwhile",
        given=replicas()
        .work("forward", *EVERYBODY)
        .end("killed", 2)
        .no_answer(2)
        .seconds(0.2)
        .end("asked", 1)
        .ask(0.5)
        .answer(2)
        .ask(3.5),
        must_come=[crash([2], "rank", "restart")],
        never=[0, 1, 3],
    ),
    Row(
        "a machine is lost, and the launcher ends the trainers of the others one after the other",
        given=confirmed(
            replicas(6)
            .work("forward", *range(6))
            .no_answer(2, 3)
            .end("asked", 0)
            .seconds(0.2)
            .end("asked", 1, 4, 5)
        ),
        must_come=[lost([2, 3], "machine", "replace")],
    ),
    Row(
        "a machine is lost, and a launcher ends the others inside the operation in which they wait for it",
        given=confirmed(
            replicas(6)
            .enter("world", 0, 1, 4, 5)
            .no_answer(2, 3, connection="closed")
            .seconds(2)
            .end("asked", 0, 1, 4, 5)
        ),
        must_come=[lost([2, 3], "machine", "replace")],
    ),
    Row(
        "a launcher ends a job, and the observers of one machine are too busy to answer at first",
        given=replicas(6)
        .work("forward", *range(6))
        .end("asked", *range(6))
        .no_answer(2, 3)
        .ask(0.1)
        .answer(2, 3)
        .ask(3.5),
        must_come=[],
        never=range(6),
    ),
    Row(
        "a launcher ends a job one machine after the other, and removes each with its observers",
        given=confirmed(
            replicas(6)
            .work("forward", *range(6))
            .end("asked", 2, 3)
            .record_end(2, 3)
            .no_answer(2, 3)
            .seconds(5)
            .end("asked", 0, 1, 4, 5)
        ),
        must_come=[],
        never=range(6),
    ),
    Row(
        "the same, and another machine was lost before",
        given=confirmed(
            replicas(8)
            .enter("world", *range(6))
            .no_answer(6, 7)
            .end("asked", 2, 3)
            .record_end(2, 3)
            .no_answer(2, 3)
            .seconds(5)
            .end("asked", 0, 1, 4, 5)
        ),
        must_come=[lost([6, 7], "machine", "replace")],
        never=range(6),
    ),
    Row(
        "a launcher ends a job, and a rank is not watched any more: nobody expects its answer",
        given=confirmed(
            replicas()
            .work("forward", *EVERYBODY)
            .no_answer(2, connection="closed")
            .record_end(2)
            .end("asked", 0, 1, 3)
        ),
        must_come=[],
        never=EVERYBODY,
    ),
    Row(
        "a launcher ends the only rank that answers: it may be cut off from all others",
        given=confirmed(replicas().enter("world", *EVERYBODY).no_answer(0, 1, 2).end("asked", 3)),
        must_come=either([hang(EVERYBODY, "job", "inspect")], [hang(EVERYBODY, "job", "preflight")]),
        never=EVERYBODY,
    ),
    # Too few answer.
    Row(
        "two machines of three answer, and all ranks have entered the operation",
        given=confirmed(cut_in_two(2, 3, 4, 5)),
        must_come=[lost([0, 1], "machine", "replace")],
    ),
    Row(
        "one machine of three answers: it may itself be cut off",
        given=confirmed(cut_in_two(0, 1)),
        must_come=either([hang(range(6), "job", "inspect")], [hang(range(6), "job", "preflight")]),
    ),
    Row(
        "one rank of six answers, and waits for its neighbour, which does not: that says little of the job",
        given=confirmed(
            Job(replica=6, machines=["a"] * 4 + ["b"] * 2)
            .group("pair", 4, 5)
            .steps(2)
            .enter("pair", 5)
            .no_answer(0, 1, 2, 3, 4)
        ),
        must_come=either([hang(range(6), "job", "inspect")], [hang(range(6), "job", "preflight")]),
    ),
]


@pytest.mark.parametrize("row", cases(ROWS))
def test_lost_machines(row: Row):
    *on_the_way, answer = rounds.conclusions(row.given)
    check(row, answer, on_the_way=on_the_way)
