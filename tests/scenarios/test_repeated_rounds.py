"""What is written while rounds repeat: each finding once, and once more when it is over."""

from __future__ import annotations

import pytest

from tests.scenarios.paper import BARRIER, Job, one_each, replicas, two_each
from tests.scenarios.rows import (
    Finding,
    Row,
    cases,
    check,
    crash,
    divergence,
    either,
    hang,
    lost,
)
from tests.scenarios.today import rounds

EVERYBODY = (0, 1, 2, 3)
LATE_1, LATE_2, LATE_3 = (hang([rank], "rank", "restart") for rank in (1, 2, 3))


def new(finding: Finding) -> tuple[str, Finding]:
    return "new", finding


def over(*ranks: int) -> tuple[str, tuple[int, ...]]:
    """The finding with these ranks is over: they move again."""
    return "over", ranks


def one_is_late(job: Job, late: int) -> Job:
    return job.work("forward", *EVERYBODY).enter("world", *job.all_but(late)).work("input", late).ask()


def comes(job: Job, late: int) -> Job:
    return job.enter("world", late)


def one_after_the_other() -> Job:
    """In one step rank 1 is late for the first operation, and rank 3 for the second."""
    return comes(one_is_late(comes(one_is_late(replicas(), 1), 1), 3), 3)


def long_wait() -> Job:
    """Ranks 0 and 1 wait for rank 2 for all of the 60 s that their library allows."""
    job = Job(replica=4, machines=two_each(4)).group("world", *EVERYBODY, timeout=60).steps(3)
    return job.enter("world", 0, 1, 3).work("input", 2).ask().seconds(54)


ROWS = [
    Row(
        "a rank sleeps, three rounds are held, and it goes on",
        given=one_is_late(replicas(), 2).ask(10).ask(20).enter("world", 2).finish_step().seconds(1),
        must_come=[new(LATE_2), over(2)],
    ),
    Row(
        "a rank sleeps twice, in two steps",
        given=one_is_late(comes(one_is_late(replicas(), 2), 2).finish_step(), 2),
        must_come=[new(LATE_2), over(2), new(LATE_2)],
    ),
    Row(
        "a late rank is killed: the job ends because of one thing",
        given=one_is_late(replicas(), 2).end("killed", 2).seconds(0.1).end("failed", 0, 1, 3).ask(0.5),
        must_come=either([new(LATE_2)], [new(LATE_2), new(crash([2], "rank", "restart"))]),
    ),
    Row(
        "a machine is lost, and then the others fail because of that",
        given=replicas(6)
        .enter("world", 0, 1, 4, 5)
        .no_answer(2, 3)
        .ask()
        .ask(3.5)
        .end("failed", 0, 1, 4, 5)
        .ask(0.5),
        must_come=[new(lost([2, 3], "machine", "replace"))],
    ),
    Row(
        "a late rank has come and all go on, and only then does the library end two that had waited for it",
        given=long_wait()
        .enter("world", 2)
        .finish_step()
        .enter("world", *EVERYBODY)
        .seconds(2)
        .end("failed", 0, 1)
        .ask(0.5),
        must_come=either([new(LATE_2), over(2)], [new(LATE_2), over(2), new(LATE_2)]),
    ),
    Row(
        "two ranks are late in one step, one after the other, and both go on",
        given=one_after_the_other().finish_step().seconds(1),
        must_come=either(
            [new(LATE_1), new(LATE_3), over(1), over(3)],
            [new(LATE_1), new(LATE_3), over(3), over(1)],
            [new(LATE_1), over(1), new(LATE_3), over(3)],
        ),
    ),
    Row(
        "two ranks are late in turn, four times in one step",
        given=comes(one_is_late(comes(one_is_late(one_after_the_other(), 1), 1), 3), 3),
        must_come=[new(LATE_1), new(LATE_3)],
    ),
    Row(
        "a round is repeated at the very moment when the late rank has come, and another one is still busy",
        given=replicas(stacks="shown")
        .enter("world", 0, 1, 3)
        .work("input", 2)
        .ask()
        .seconds(10)
        .enter("world", 2)
        .work("backward", 1, 2, 3)
        .enter("world", 2, 3)
        .ask(0),
        must_come=[new(LATE_2)],
    ),
    Row(
        "two of four have entered different operations; when the others come, they show who is wrong",
        given=replicas(machines=one_each(4))
        .work("forward", *EVERYBODY)
        .enter("world", 0)
        .enter("world", 2, operation=BARRIER)
        .ask()
        .enter("world", 1, 3)
        .ask(10),
        must_come=either(
            *([new(divergence([2], "rank", action))] for action in ("restart", "stop")),
            *([new(divergence(EVERYBODY, "process group", action))] for action in ("restart", "stop")),
        ),
    ),
]


@pytest.mark.parametrize("row", cases(ROWS))
def test_repeated_rounds(row: Row):
    check(row, rounds.written(row.given))
