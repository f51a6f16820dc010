"""Members of a group issued different operations: who differs, and when nobody can say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.scenarios.paper import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    Job,
    Operation,
    one_each,
    replicas,
)
from tests.scenarios.rows import Either, Row, cases, check, divergence, either, hang
from tests.scenarios.today import rounds

EVERYBODY = (0, 1, 2, 3)


def differs(ranks: Sequence[int], scope: str = "rank") -> Either:
    """A restart may hang again, for it is a bug of the program; the policy decides that."""
    return either([divergence(ranks, scope, "restart")], [divergence(ranks, scope, "stop")])


def reduced(*shape: int) -> Operation:
    return Operation("all_reduce", shape, reduction="sum")


def broadcast(root: int) -> Operation:
    return Operation("broadcast", (1,), "int64", root=root)


def long_ago(*, steps: int = 70) -> Job:
    """Rank 3 sent 7 numbers where the others sent 5. That did no harm, and healthy steps followed."""
    job = Job(replica=4, machines=one_each(4)).enter("world", 0, 1, 2, operation=reduced(5))
    return job.enter("world", 3, operation=reduced(7)).finish_step().steps(steps)


def skipped() -> Job:
    """By numbers the others are late now: rank 2 is one ahead of them."""
    job = replicas().enter("world", 0, 1, 3, operation=ALL_GATHER)
    return job.enter("world", 2).enter("world", 2, operation=BARRIER)


def which_causes_waits() -> Job:
    """Rank 2 left its own broadcast and now works. 0 and 5 wait elsewhere for those it left behind."""
    job = Job(replica=6).group("three", 1, 2, 3).group("two", 0, 1).group("more", 2, 5).steps(2)
    job.enter("three", 1, 3).enter("three", 2, operation=broadcast(2)).work("forward", 2, 4)
    return job.enter("two", 0).enter("more", 5)


def partly_out_of_sight() -> Job:
    """Of the operation in which rank 1 differs, rank 0 shows nothing any more: of two, there is no majority.
    The next one follows from the same history on ranks 0 and 2."""
    job = Job(replica=3).group("alone", 0).steps(2)
    job.post("world", 1).post("world", 0, 2, operation=BARRIER)
    for _ in range(64):
        job.enter("alone", 0)
    return job.post("world", 0, 1, 2)


def a_waited_for_pair() -> Job:
    """Ranks 2 and 3 differ and go on, and 0 and 1 wait for them elsewhere."""
    job = Job(replica=4).group("pair", 2, 3).group("first", 0, 2).group("second", 1, 3).steps(2)
    job.enter("pair", 2).enter("pair", 3, operation=BARRIER).work("forward", 2, 3)
    return job.enter("first", 0).enter("second", 1)


def in_two_pairs() -> Job:
    """Rank 3 skips a layer. Neither its tensor pair nor its replica pair has a majority; both share it."""
    job = Job(replica=2, tensor=2).steps(2)
    for groups in (job.along("tensor"), job.along("replica")):
        for rank in range(4):
            job.enter(groups[rank], rank, operation=BARRIER if rank == 3 else ALL_REDUCE)
    return job


def in_a_pair_and_a_divided_group() -> Job:
    job = Job(replica=5).group("four", *EVERYBODY).group("pair", 3, 4).steps(2)
    job.enter("four", 0, 1).enter("four", 2, 3, operation=BARRIER)
    return job.enter("pair", 3).enter("pair", 4, operation=BARRIER)


UNEVEN = [[0, 7, 1, 3], [9, 9, 0, 0], [1, 2, 3, 4], [5, 0, 0, 5]]


def exchange(
    job: Job,
    matrix: Sequence[Sequence[int]],
    wrong: Mapping[int, Sequence[int]] | None = None,
    without: Sequence[int] = (),
) -> Job:
    """``matrix[i][j]`` is what i sends to j, and ``wrong`` what some ranks expect instead."""
    for rank, sends in enumerate(matrix):
        receives = (wrong or {}).get(rank, [row[rank] for row in matrix])
        if rank not in without:
            job.enter("world", rank, operation=ALL_TO_ALL, sends=tuple(sends), receives=tuple(receives))
    return job


ROWS = [
    # One member differs.
    *(
        Row(
            f"one rank enters an all-reduce with another {what}",
            given=replicas().enter("world", 0, 1, 3).enter("world", 2, operation=operation).ask(),
            must_come=differs([2]),
        )
        for what, operation in {
            "number of elements": reduced(512),
            "type of elements": Operation("all_reduce", dtype="bfloat16", reduction="sum"),
            "reduction": Operation("all_reduce", reduction="max"),
        }.items()
    ),
    Row(
        "one rank enters a barrier where the others reduce",
        given=replicas().enter("world", 0, 1, 3).enter("world", 2, operation=BARRIER).ask(),
        must_come=differs([2]),
    ),
    Row(
        "one rank takes another root for a broadcast",
        given=replicas()
        .enter("world", 0, 2, 3, operation=broadcast(0))
        .enter("world", 1, operation=broadcast(1))
        .ask(),
        must_come=differs([1]),
    ),
    Row(
        "the operations since then are equal, and nobody returns from the last one",
        given=replicas()
        .post("world", 0, 1, 3)
        .post("world", 2, operation=BARRIER)
        .post("world", *EVERYBODY)
        .enter("world", *EVERYBODY)
        .ask(),
        must_come=differs([2]),
    ),
    Row(
        "so many operations followed that the first difference cannot be shown any more",
        given=long_ago().enter("world", *EVERYBODY).ask(),
        must_come=differs([3]),
    ),
    Row(
        "one rank differs, and what another one did there is out of sight",
        given=partly_out_of_sight().enter("world", 0, 1, 2).ask(),
        must_come=differs([1]),
    ),
    Row(
        "the same did no harm, and now that other rank is late",
        given=partly_out_of_sight().enter("world", 1, 2).ask(),
        must_come=[hang([0], "rank", "restart")],
    ),
    Row(
        "one rank posts something else and works on; then a rank waits for it, and no stack shows that",
        given=Job(replica=3, stacks="none")
        .steps(2)
        .post("world", 0, 2)
        .post("world", 1, operation=BARRIER)
        .work("optimizer", 0, 1, 2)
        .receive(0, 1)
        .ask(),
        must_come=differs([1]),
    ),
    Row(
        "over NCCL, hosts run ahead, and one has issued another operation",
        given=replicas()
        .devices_follow(*EVERYBODY)
        .enter("world", 0, 2, 3)
        .enter("world", 1, operation=ALL_GATHER)
        .devices_follow(*EVERYBODY)
        .work("idle", *EVERYBODY)
        .ask(),
        must_come=differs([1]),
    ),
    Row(
        "one rank leaves an operation out, and is ahead of the others since",
        given=skipped().ask(),
        must_come=differs([2]),
    ),
    Row(
        "one rank differs in one group, and all wait in another",
        given=replicas()
        .group("other", *EVERYBODY)
        .post("world", 0, 1, 3)
        .post("world", 2, operation=BARRIER)
        .enter("other", *EVERYBODY)
        .ask(),
        must_come=differs([2]),
    ),
    Row(
        "one rank differs and goes on, while others wait elsewhere for those it left behind",
        given=which_causes_waits().ask(),
        must_come=differs([2]),
    ),
    Row(
        "the library ends a rank because another one differs",
        given=replicas()
        .work("forward", *EVERYBODY)
        .enter("world", 0, 2, 3)
        .enter("world", 1, operation=reduced(512))
        .end("failed", 0)
        .ask(0.5),
        must_come=differs([1]),
    ),
    Row(
        "the library ends a rank for what another one has posted, while all go on",
        given=replicas()
        .post("world", 0, 2, 3)
        .post("world", 1, operation=reduced(512))
        .work("forward", *EVERYBODY)
        .end("failed", 0)
        .ask(0.5),
        must_come=differs([1]),
    ),
    Row(
        "two pairs differ and share one rank",
        given=in_two_pairs().ask(),
        must_come=differs([3]),
    ),
    # Nobody can say who is right.
    Row(
        "two against two",
        given=replicas().enter("world", 0, 1).enter("world", 2, 3, operation=BARRIER).ask(),
        must_come=differs(EVERYBODY, "process group"),
    ),
    Row(
        "two members of a pair differ",
        given=Job(replica=2).steps(2).enter("world", 0).enter("world", 1, operation=BARRIER).ask(),
        must_come=differs([0, 1], "process group"),
    ),
    Row(
        "two members of a pair differ and go on, and two more wait for one of them each",
        given=a_waited_for_pair().ask(),
        must_come=differs([2, 3], "process group"),
    ),
    Row(
        "a message is sent with another size than is expected",
        given=Job(pipeline=3).steps(2).send(0, 1, shape=8).receive(1, 0, shape=16).receive(2, 1).ask(),
        must_come=differs([0, 1], "process group"),
    ),
    Row(
        "a pair and a divided group share a rank, which would not explain both",
        given=in_a_pair_and_a_divided_group().ask(),
        must_come=differs(range(5), "process group"),
    ),
    Row(
        "one of two that differ was ended by the library, and two have not come so far but move",
        given=replicas()
        .work("forward", *EVERYBODY)
        .enter("world", 1)
        .enter("world", 2, operation=BARRIER)
        .end("failed", 1)
        .work("forward", 0, 3)
        .ask(0),
        must_come=[],
    ),
    Row(
        "two of five members have not come, and of the three that have one differs",
        given=Job(replica=5)
        .steps(2)
        .enter("world", 0, 1, operation=ALL_GATHER)
        .enter("world", 2)
        .work("forward", 3, 4)
        .ask(),
        must_come=either(*differs(range(5), "process group").answers, [hang([3, 4], "rank", "restart")]),
        never=[0, 1, 2],
    ),
    # What is no difference, or has nothing to do with the hang.
    Row(
        "a late rank has not differed",
        given=replicas()
        .enter("world", 0, 1, 3)
        .enter("world", 0, 1, 3, operation=BARRIER)
        .work("input", 2)
        .ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "nobody waits where they differ",
        given=replicas()
        .post("world", 0, 1, 3)
        .post("world", 2, operation=BARRIER)
        .work("input", *EVERYBODY)
        .ask(),
        must_come=[],
    ),
    Row(
        "a rank reduces the same 32 elements in another shape, and another rank is late",
        given=replicas()
        .work("forward", *EVERYBODY)
        .enter("world", 0, 2, operation=reduced(32))
        .enter("world", 3, operation=reduced(4, 8))
        .work("input", 1)
        .ask(),
        must_come=[hang([1], "rank", "restart")],
        never=[0, 2, 3],
    ),
    Row(
        "a rank did something else 70 steps ago, and another rank is late now",
        given=long_ago().enter("world", 0, 2, 3).work("input", 1).ask(),
        must_come=[hang([1], "rank", "restart")],
        never=[0, 2, 3],
    ),
    Row(
        "the library refused an operation of a rank, whose script went on without it; another rank is late",
        given=replicas()
        .refused("world", 3, ALL_GATHER)
        .steps(2)
        .enter("world", 0, 2, 3)
        .work("input", 1)
        .ask(),
        must_come=[hang([1], "rank", "restart")],
        never=[0, 2, 3],
    ),
    # What ranks send to each other in an all-to-all, and what they expect.
    Row(
        "uneven splits fit, and a rank is late afterwards",
        given=exchange(Job(replica=4).steps(2), UNEVEN)
        .work("forward", *EVERYBODY)
        .enter("world", 0, 1, 3)
        .work("input", 2)
        .ask(),
        must_come=[hang([2], "rank", "restart")],
    ),
    Row(
        "the splits of one rank fit nobody's",
        given=exchange(Job(replica=4).steps(2), UNEVEN, {2: [2, 1, 3, 1]}).ask(),
        must_come=differs([2]),
    ),
    Row(
        "the splits of one pair do not fit",
        given=exchange(Job(replica=4).steps(2), UNEVEN, {2: [1, 0, 3, 99]}).ask(),
        must_come=differs(EVERYBODY, "process group"),
    ),
    Row(
        "of two ranks, one expects something else from both",
        given=exchange(Job(replica=2).steps(2), [[1, 2], [3, 4]], {1: [20, 40]}).ask(),
        must_come=differs([0, 1], "process group"),
    ),
    Row(
        "one of three ranks contradicts itself as well",
        given=exchange(Job(replica=3).steps(2), [[1, 2, 3], [4, 5, 6], [7, 8, 9]], {1: [2, 50, 80]}).ask(),
        must_come=differs([1]),
    ),
    Row(
        "a rank has not entered the exchange",
        given=exchange(Job(replica=4).steps(2), UNEVEN, without=[3]).work("input", 3).ask(),
        must_come=[hang([3], "rank", "restart")],
    ),
]


@pytest.mark.parametrize("row", cases(ROWS))
def test_divergence(row: Row):
    *on_the_way, answer = rounds.conclusions(row.given)
    check(row, answer, on_the_way=on_the_way)
