"""Whom the checks of a small training job accuse, and whether they certify what it has trained.

A row is a job of a few steps, with bits that flip in it, or a program that does something besides training.
Nobody mends what has flipped, so that a job with a fault may not be certified after its last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest

from tests.scenarios.rows import Either, Finding, Row, cases, check, either, sdc, wrong_today
from tests.scenarios.today import checks


class Flip(NamedTuple):
    """One bit flips, on one rank.

    ``weight``, ``average`` (of the optimizer, for that weight) and ``buffer`` flip in memory, after the step
    and its check. ``update`` flips in what the update of a step has computed. ``output`` and ``gradient`` of
    a layer flip whenever that is replayed after the step, ``output once`` in a single replay.
    """

    rank: int
    what: str
    step: int


@dataclass(frozen=True)
class Job:
    """A training job."""

    layout: str
    """``replicas`` hold copies of all state, ``owners`` a part each that no other rank has. Both are threads.
    ``DDP`` and ``FSDP2`` are real ranks."""
    ranks: int
    flips: Sequence[Flip] = ()
    program: str = "it only trains"
    """What it does."""
    every: int = 1
    """Steps from one check to the next."""
    steps: int = 5
    require: Sequence[str] = ()
    """Results that must be compared, or nothing is certified."""
    device: str = "cpu"
    """Or ``cuda``, one device for all ranks."""


class Concluded(NamedTuple):
    """What the checks of a job have found."""

    findings: list[Finding]
    certified: bool
    """Whether the state after the last step is certified."""
    waited: bool = False
    """Whether ranks waited for another one until the time limit."""


def accuses(*ranks: int) -> Concluded:
    """Each of these ranks is named by itself, one after the other, and nothing is certified any more."""
    return Concluded([sdc([rank], "rank", "replace") for rank in ranks], certified=False)


replicas, owners, ddp, fsdp2 = (partial(Job, layout) for layout in ("replicas", "owners", "DDP", "FSDP2"))
CLEAN = Concluded([], certified=True)
NOTHING_CERTIFIED = Concluded([], certified=False)
NOBODY: Either = either(CLEAN, NOTHING_CERTIFIED)
"""Nobody is named. Whether that may be certified is not decided here."""
CLAMPS = "a hook clamps the weights after each update"
ZEROES_A_ROW = "a row of a table is set to zero after each update, on rank 0, which alone has it"
SCALES_ONCE = "all ranks scale a weight by parameter.data, once"
DRAWS = "a layer draws random numbers that no seed decides"
LONG, GPU = [pytest.mark.long], [pytest.mark.gpu]

ROWS = [
    # Replicas, of which a majority says who is wrong.
    Row("replicas that only train", given=replicas(3), must_come=CLEAN),
    Row(
        "a weight flips on one of three replicas",
        given=replicas(3, [Flip(1, "weight", 3)]),
        must_come=accuses(1),
        never=[0, 2],
    ),
    Row(
        "an average of the optimizer flips on one of three replicas",
        given=replicas(3, [Flip(1, "average", 3)]),
        must_come=accuses(1),
        never=[0, 2],
    ),
    Row(
        "a buffer flips on one of three replicas",
        given=replicas(3, [Flip(1, "buffer", 3)]),
        must_come=accuses(1),
        never=[0, 2],
        wrong=wrong_today("replay B7", says=CLEAN),
    ),
    Row(
        "the output of a layer flips on one of three replicas",
        given=replicas(3, [Flip(1, "output", 3)]),
        must_come=accuses(1),
        never=[0, 2],
    ),
    Row(
        "the gradient of a weight flips on one of three replicas",
        given=replicas(3, [Flip(1, "gradient", 3)]),
        must_come=accuses(1),
        never=[0, 2],
    ),
    Row(
        "the output of a layer flips in one of many replays: nobody is named, and nothing is certified",
        given=replicas(3, [Flip(1, "output once", 5)]),
        must_come=NOTHING_CERTIFIED,
    ),
    Row(
        "a weight flips on one of two replicas: nobody can say on which",
        given=replicas(2, [Flip(1, "weight", 3)]),
        must_come=Concluded([sdc([0, 1], "peer group", "preflight")], certified=False),
    ),
    # Owners, who prove their own faults: what they hold changes between two updates.
    Row("owners that only train", given=owners(3), must_come=CLEAN),
    Row(
        "a weight flips that only one rank has",
        given=owners(3, [Flip(1, "weight", 3)]),
        must_come=accuses(1),
        never=[0, 2],
    ),
    Row(
        "an average of the optimizer flips that only one rank has",
        given=owners(3, [Flip(1, "average", 3)]),
        must_come=accuses(1),
        never=[0, 2],
    ),
    Row(
        "a weight flips twice between two checks, in the same place",
        given=owners(3, [Flip(1, "weight", 5), Flip(1, "weight", 6)], every=4, steps=8),
        must_come=accuses(1),
        never=[0, 2],
        wrong=wrong_today("replay B8", says=NOTHING_CERTIFIED),
    ),
    Row(
        "an owner computes a wrong update of its part",
        given=owners(3, [Flip(0, "update", 1)]),
        must_come=accuses(0),
        never=[1, 2],
    ),
    # Programs that change state themselves.
    Row("replicas clamp their weights after each update", given=replicas(3, program=CLAMPS), must_come=CLEAN),
    Row(
        "owners clamp their weights after each update",
        given=owners(3, program=CLAMPS),
        must_come=NOBODY,
        never=[0, 1, 2],
        wrong=wrong_today("replay B2", says=accuses(0, 1, 2, 0, 1)),
    ),
    Row("owners scale a weight, all at once", given=owners(3, program=SCALES_ONCE), must_come=NOBODY),
    Row(
        "an owner zeroes a row of a table after each update, and several updates precede each check",
        given=owners(3, program=ZEROES_A_ROW, every=4, steps=8),
        must_come=NOBODY,
    ),
    Row(
        "an owner zeroes a row of a table after each update, and each is checked",
        given=owners(3, program=ZEROES_A_ROW),
        must_come=NOBODY,
        never=[0],
        wrong=wrong_today("seen", says=accuses(0, 0)),
    ),
    Row(
        "replicas keep running statistics of their own data",
        given=replicas(3, program="each rank keeps running statistics of its own data"),
        must_come=CLEAN,
    ),
    # Numbers that are no rank's fault.
    Row(
        "the loss becomes NaN on all ranks",
        given=replicas(3, program="the loss becomes NaN in the last step"),
        must_come=NOTHING_CERTIFIED,
    ),
    Row(
        "buffers hold infinity, as attention masks do",
        given=replicas(3, program="buffers hold infinity, as attention masks do"),
        must_come=CLEAN,
    ),
    Row("a layer never repeats its numbers", given=replicas(3, program=DRAWS), must_come=CLEAN),
    Row(
        "a layer never repeats its numbers, and the user requires that outputs are compared",
        given=replicas(3, program=DRAWS, require=["forward"]),
        must_come=NOTHING_CERTIFIED,
    ),
    Row(
        "the gradients of outputs have odd addresses on the rank that sends them, and even ones elsewhere",
        given=replicas(
            3,
            program="outputs are packed behind one number, so that their gradients have odd addresses",
            device="cuda",
        ),
        must_come=CLEAN,
        never=[0, 1, 2],
        wrong=wrong_today("replay B14", says=accuses(0, 1, 2, 0, 1)),
        marks=GPU,
    ),
    # What cannot be replayed because of the program is left out; a replay that failed certifies nothing.
    Row(
        "a layer writes to its own weight, and can never be replayed",
        given=replicas(3, program="a layer writes to its own weight"),
        must_come=CLEAN,
    ),
    Row(
        "a layer has no memory on one rank whenever it is replayed",
        given=replicas(3, program="a layer has no memory on rank 1 whenever it is replayed"),
        must_come=NOTHING_CERTIFIED,
    ),
    Row(
        "there is no memory to copy what a layer receives: no layer is ever replayed",
        given=replicas(3, program="there is no memory to copy what a layer receives"),
        must_come=NOTHING_CERTIFIED,
        wrong=wrong_today("replay B1", says=CLEAN),
    ),
    Row(
        "there is no memory to copy what an update starts from: no update is ever recomputed",
        given=replicas(3, program="there is no memory to copy what an update starts from"),
        must_come=NOTHING_CERTIFIED,
        wrong=wrong_today("replay B1", says=CLEAN),
    ),
    # Real jobs.
    Row("DDP: a weight flips", given=ddp(3, [Flip(1, "weight", 3)]), must_come=accuses(1), marks=LONG),
    Row("FSDP2 that only trains", given=fsdp2(3), must_come=CLEAN, marks=LONG),
    Row("FSDP2: a weight flips", given=fsdp2(3, [Flip(1, "weight", 3)]), must_come=accuses(1), marks=LONG),
    Row(
        "FSDP2: a hook clamps the weights after each update",
        given=fsdp2(3, program=CLAMPS),
        must_come=NOBODY,
        never=[0, 1, 2],
        wrong=wrong_today("replay B2", says=accuses(0, 1, 2, 0, 1)),
        marks=LONG,
    ),
    Row(
        "DDP: the weights are averaged in every other step, and the gradients are not",
        given=ddp(3, program="weights are averaged in every other step, and gradients are not"),
        must_come=NOBODY,
        never=[0, 1, 2],
        wrong=wrong_today(
            "replay B13",
            says=Concluded([sdc([0, 1, 2], "peer group", "preflight"), *accuses(2, 0, 1).findings], False),
        ),
        marks=LONG,
    ),
    Row(
        "DDP: torchscout fails to attach on one rank; the others know that at once",
        given=ddp(3, program="a layer of rank 1 takes no hooks"),
        must_come=NOBODY,
        wrong=wrong_today("replay B16", says=Concluded([], certified=False, waited=True)),
        marks=LONG,
    ),
]


@pytest.mark.parametrize("row", cases(ROWS))
def test_checks(row: Row):
    answer = checks.concluded(row.given)
    check(row, answer, on_the_way=[answer[0]])
