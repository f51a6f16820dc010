"""Who is named for silent data corruption, from what the ranks hold and compute in checks.

In a check ranks that do the same work compare their state, and one of them sends the input of a layer to the
others, which all repeat its forward and backward pass. Whoever has other numbers than the majority is
corrupt, unless the numbers differ by design or because a kernel does not repeat its own numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from tests.scenarios.rows import Finding, Row, cases, check, sdc, wrong_today
from tests.scenarios.today import corruption

FAILED, NOTHING = "failed", "nothing"
"""A rank's replay raised an error; a rank has no such tensor."""
Value = int | str
"""A number that stands for all bits of a tensor, ``FAILED`` or ``NOTHING``."""
Values = Sequence[Value] | Callable[[int], Sequence[Value]]
"""What every rank has, in rank order: always, or in the n-th replay of a check, where the first is 0."""


@dataclass(frozen=True)
class Check:
    """One check. The ranks agree on everything that is not mentioned."""

    state: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    """By the name of the tensor, as ``layer.0/weight``, or ``layer.0/weight.exp_avg`` of the optimizer."""
    input: Values | None = None
    output: Values | None = None
    gradient: Values | None = None
    """Input, output and input gradient of the layer that is replayed in this check."""
    scaled: Mapping[float, Values] = field(default_factory=dict)
    """The output where the input was multiplied by this factor."""


@dataclass(frozen=True)
class Job:
    """Data-parallel replicas, each of which may be split over several ranks, and their checks."""

    ranks: int
    checks: Sequence[Check]
    tensor: int = 1
    stages: int = 1
    """Tensor-parallel ranks, or pipeline stages, of one replica; they are neighbours."""
    machines: Sequence[str] | None = None
    """Of each rank; without them every rank has a machine of its own."""
    layers: int = 1
    """Each check replays the next one."""
    scales: Sequence[float] = (1.0,)
    """The factors by which inputs are multiplied, one replay for each."""
    before: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    """State before training that is not equal on all ranks."""


class Report(NamedTuple):
    """One report, and what is wrong: ``state``, ``computation`` or ``input``; empty where nobody can say."""

    finding: Finding
    about: str = ""


def job(ranks: int, *checks: Check, **settings: object) -> Job:
    return Job(ranks, checks, **settings)


def named(*ranks: int, about: str, scope: str = "rank") -> Report:
    return Report(sdc(ranks, scope, "replace"), about)


def disagree(*ranks: int, about: str) -> Report:
    """One of these ranks is wrong, and nobody can say which: all of them are tested."""
    return Report(sdc(ranks, "peer group", "preflight"), about)


def in_turn(*values: Sequence[Value]) -> Values:
    """One after the other in successive replays of a check; the last goes on."""
    return lambda replay: values[min(replay, len(values) - 1)]


def at_random(seed: int, rates: Sequence[float], results: int = 3) -> Values:
    """Each rank's kernel gives one of some unusual results at this rate."""

    def values(replay: int) -> Sequence[Value]:
        draw = random.Random(f"{seed}, {replay}")  # every rank asks for what all ranks have
        return [draw.randrange(1, results) if draw.random() < rate else 0 for rate in rates]

    return values


WEIGHT = "layer.0/weight"
AVERAGES = tuple(f"layer.{number}/weight.exp_avg" for number in range(4))
CLEAN = Check()
ONE_WRONG = [7, 7, 9, 7]
EVERY_THIRD = in_turn(*[ONE_WRONG, [7, 7, 7, 7], [7, 7, 7, 7]] * 32)

ROWS = [
    # A majority says who is wrong.
    Row("all ranks have the same numbers: silence", given=job(4, CLEAN, CLEAN), must_come=[]),
    Row(
        "one of four replicas holds another weight",
        given=job(4, Check(state={WEIGHT: ONE_WRONG})),
        must_come=[named(2, about="state")],
        never=[0, 1, 3],
    ),
    Row(
        "one of three computes another output, in every replay",
        given=job(3, Check(output=[7, 9, 7])),
        must_come=[named(1, about="computation")],
        never=[0, 2],
    ),
    Row(
        "the output and the gradient of one rank are wrong: one report",
        given=job(4, Check(output=ONE_WRONG, gradient=[3, 3, 4, 3])),
        must_come=[named(2, about="computation")],
    ),
    Row(
        "one received another input: whatever it computes from that is not held against it",
        given=job(4, Check(input=ONE_WRONG, output=[3, 3, 4, 3], gradient=[5, 5, 6, 5])),
        must_come=[named(2, about="input")],
    ),
    Row(
        "two of five are wrong, in different ways",
        given=job(5, Check(output=[7, 9, 7, 8, 7])),
        must_come=[named(1, 3, about="computation")],
        never=[0, 2, 4],
    ),
    Row(
        "two of five are wrong, and share a machine: the machine is named",
        given=job(5, Check(output=[7, 7, 7, 9, 9]), machines="aabcc"),
        must_come=[named(3, 4, about="computation", scope="machine")],
    ),
    Row(
        "two of five are wrong at different places: two reports",
        given=job(5, Check(output=[7, 9, 7, 7, 7], gradient=[3, 3, 3, 3, 4])),
        must_come=[named(1, about="computation"), named(4, about="computation")],
    ),
    # Tensor-parallel ranks add up what they compute: if one is wrong, its partner's result is wrong too.
    Row(
        "both partners of a tensor-parallel pair compute a wrong sum: they are named together, once",
        given=job(8, Check(output=[7, 3, 7, 3, 9, 4, 7, 3]), tensor=2),
        must_come=[named(4, 5, about="computation", scope="process group")],
    ),
    Row(
        "both partners of a tensor-parallel pair on one machine compute a wrong sum: the machine is named",
        given=job(8, Check(output=[7, 3, 7, 3, 9, 4, 7, 3]), tensor=2, machines="aabbccdd"),
        must_come=[named(4, 5, about="computation", scope="machine")],
    ),
    Row(
        "one partner of a tensor-parallel pair holds a wrong weight: it is named alone",
        given=job(8, Check(state={WEIGHT: [7, 3, 7, 3, 7, 4, 7, 3]}), tensor=2),
        must_come=[named(5, about="state")],
        never=[4],
    ),
    Row(
        "a rank holds a wrong weight, so that its partner computes a wrong sum as well: it is named alone",
        given=job(
            8, Check(state={WEIGHT: [7, 3, 7, 3, 9, 3, 7, 3]}, output=[7, 3, 7, 3, 9, 4, 7, 3]), tensor=2
        ),
        must_come=[named(4, about="state")],
        never=[5],
    ),
    Row(
        "two pipeline stages of one replica compute something wrong: each does so by itself",
        given=job(8, Check(output=[7, 3, 7, 3, 9, 4, 7, 3]), stages=2),
        must_come=[named(4, about="computation"), named(5, about="computation")],
    ),
    # Without a majority.
    Row(
        "two replicas hold another weight each",
        given=job(2, Check(state={WEIGHT: [7, 9]})),
        must_come=[disagree(0, 1, about="state")],
    ),
    Row(
        "two against two compute another output each",
        given=job(4, Check(output=[7, 7, 9, 9])),
        must_come=[disagree(0, 1, 2, 3, about="computation")],
    ),
    Row(
        "each of three computes another output, the same in every replay",
        given=job(3, Check(output=[7, 8, 9])),
        must_come=[disagree(0, 1, 2, about="computation")],
    ),
    # What does not repeat.
    Row(
        "one rank computes other wrong numbers in each replay",
        given=job(4, Check(output=lambda replay: [7, 7, 100 + replay, 7])),
        must_come=[named(2, about="computation")],
    ),
    Row(
        "one rank is wrong in a single replay of many: nobody is named",
        given=job(4, Check(output=in_turn(ONE_WRONG, [7, 7, 7, 7]))),
        must_come=[],
    ),
    Row(
        "one rank is wrong in ten replays of many: that may be the kernel's chance, and nobody is named",
        given=job(4, Check(output=in_turn(*[ONE_WRONG] * 10, [7, 7, 7, 7]))),
        must_come=[],
    ),
    Row(
        "one rank is wrong in every third replay of two checks: together that is too often for chance",
        given=job(4, Check(output=EVERY_THIRD), Check(output=EVERY_THIRD)),
        must_come=[named(2, about="computation")],
    ),
    Row(
        "in the second replay another rank differs: the kernel does not repeat, and nobody is named",
        given=job(4, Check(output=in_turn(ONE_WRONG, [7, 7, 7, 9]))),
        must_come=[],
    ),
    Row(
        "one rank differs once in a check, and another one in the next: the kernel does not repeat",
        given=job(
            4,
            Check(output=in_turn(ONE_WRONG, [7, 7, 7, 7])),
            Check(output=in_turn([7, 9, 7, 7], [7, 7, 7, 7])),
            Check(output=in_turn(ONE_WRONG, [7, 7, 7, 7])),
        ),
        must_come=[],
    ),
    Row(
        "two replicas differ, and do not repeat their numbers",
        given=job(2, Check(output=lambda replay: [replay, 9])),
        must_come=[],
    ),
    Row(
        "the gradient does not repeat on any rank, and one rank computes another output",
        given=job(4, Check(output=ONE_WRONG, gradient=lambda replay: [replay, 7, 7 - replay, 7])),
        must_come=[named(2, about="computation")],
    ),
    # What could not be compared is no disagreement.
    Row(
        "the replay of one rank failed: others may depend on it, and nobody is named for what they compute",
        given=job(4, Check(output=[7, 7, FAILED, 9])),
        must_come=[],
    ),
    Row(
        "the replay of one rank failed, and another one holds another weight",
        given=job(4, Check(state={WEIGHT: [7, 7, 7, 9]}, output=[7, 7, FAILED, 7])),
        must_come=[named(3, about="state")],
        never=[2],
    ),
    Row("the replay failed on all but one", given=job(3, Check(output=[7, FAILED, FAILED])), must_come=[]),
    Row("no rank has a gradient", given=job(3, Check(gradient=[NOTHING] * 3)), must_come=[]),
    Row(
        "one rank alone has no gradient",
        given=job(3, Check(gradient=[7, NOTHING, 7])),
        must_come=[named(1, about="computation")],
    ),
    # State that differs by design.
    Row(
        "a parameter differs on all ranks before training begins, and goes on to differ",
        given=job(3, *[Check(state={WEIGHT: [step, 8, 9]}) for step in range(3)], before={WEIGHT: [1, 2, 3]}),
        must_come=[],
    ),
    Row(
        "a parameter that differed before training becomes equal: from then on a difference counts",
        given=job(3, CLEAN, Check(state={WEIGHT: [7, 7, 9]}), before={WEIGHT: [1, 2, 3]}),
        must_come=[named(2, about="state")],
    ),
    Row(
        "every rank keeps averages of its own part of the weights",
        given=job(3, Check(state={name: [1, 2, 3] for name in AVERAGES})),
        must_come=[],
    ),
    Row(
        "one average of one rank is wrong when averages are first compared",
        given=job(3, Check(state={name: [5, 9 if name is AVERAGES[1] else 5, 5] for name in AVERAGES})),
        must_come=[named(1, about="state")],
    ),
    Row(
        "three of four averages of one rank are wrong when averages are first compared",
        given=job(3, Check(state={name: [5, 5, 9] for name in AVERAGES[:3]} | {AVERAGES[3]: [5, 5, 5]})),
        must_come=[named(2, about="state")],
    ),
    Row(
        "every average is kept by one rank, and is zero on the others",
        given=job(
            3,
            Check(
                state={
                    name: [7 * (rank == place % 3) for rank in range(3)]
                    for place, name in enumerate(AVERAGES)
                }
            ),
        ),
        must_come=[],
    ),
    Row(
        "one rank alone keeps averages",
        given=job(4, Check(state={name: [5, 0, 0, 0] for name in AVERAGES})),
        must_come=[],
    ),
    Row(
        "of two ranks each keeps averages of its own part",
        given=job(2, Check(state={name: [1, 2] for name in AVERAGES[:3]} | {AVERAGES[3]: [5, 5]})),
        must_come=[],
    ),
    Row(
        "of two ranks one has a wrong average",
        given=job(2, Check(state={name: [5, 9 if name is AVERAGES[1] else 5] for name in AVERAGES})),
        must_come=[disagree(0, 1, about="state")],
    ),
    Row(
        "one rank alone has one more layer",
        given=job(3, *[Check(state={"extra/weight": [NOTHING, 7, NOTHING]})] * 2),
        must_come=[],
    ),
    Row(
        "every rank trains on its own between two averagings of the weights",
        given=job(3, CLEAN, Check(state={WEIGHT: [1, 2, 3]}), CLEAN, Check(state={WEIGHT: [4, 5, 6]})),
        must_come=[],
        wrong=wrong_today("replay B13", says=[disagree(0, 1, 2, about="state")] * 2),
    ),
    Row(
        "every rank keeps running statistics of its own data, which are called norm.running_mean",
        given=job(3, *[Check(state={"norm/running_mean": [1, 2, 3]})] * 2),
        must_come=[],
        wrong=wrong_today("newcomer, a new recipe", says=[disagree(0, 1, 2, about="state")]),
    ),
    Row(
        "the same statistics under another name",
        given=job(3, *[Check(state={"x/norm.running_mean": [1, 2, 3]})] * 2),
        must_come=[],
    ),
    # What is reported, and how often.
    Row(
        "a weight stays wrong: one report",
        given=job(4, *[Check(state={WEIGHT: ONE_WRONG})] * 4),
        must_come=[named(2, about="state")],
    ),
    Row(
        "a weight is wrong, is mended, and is wrong again: two reports",
        given=job(4, Check(state={WEIGHT: ONE_WRONG}), CLEAN, Check(state={WEIGHT: ONE_WRONG})),
        must_come=[named(2, about="state")] * 2,
    ),
    Row(
        "a rank computes one of three layers wrong whenever that layer is replayed: one report",
        given=job(4, *[Check(output=ONE_WRONG), CLEAN, CLEAN] * 3, layers=3),
        must_come=[named(2, about="computation")],
        wrong=wrong_today("observer R7", says=[named(2, about="computation")] * 3),
    ),
    Row(
        "a rank is wrong on inputs times 10 alone",
        given=job(4, Check(scaled={10.0: ONE_WRONG}), scales=(0.1, 1.0, 10.0)),
        must_come=[named(2, about="computation")],
    ),
    Row(
        "a rank is wrong on inputs times 0.1000001, and was right on inputs times 0.1",
        given=job(4, Check(scaled={0.1000001: ONE_WRONG}), scales=(0.1, 1.0, 0.1000001)),
        must_come=[named(2, about="computation")],
        wrong=wrong_today("replay B16", says=[]),
    ),
]


@pytest.mark.parametrize("row", cases(ROWS))
def test_corruption(row: Row):
    answer = corruption.reports(row.given)
    check(row, answer, on_the_way=[[finding for finding, _ in answer]])


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.02])
def test_a_kernel_that_does_not_repeat_never_names_anybody(rate: float):
    for seed in range(0, 60, 5):
        every = [Check(output=at_random(seed + number, [rate] * 4)) for number in range(5)]
        assert corruption.reports(job(4, *every)) == []


def test_a_rank_that_is_wrong_now_and_then_is_named_in_the_end():
    for seed in range(3):
        checks = [Check(output=at_random(100 * seed + number, [0, 0, 0.3, 0], 64)) for number in range(15)]
        reports = corruption.reports(job(4, *checks))
        assert {*reports} == {named(2, about="computation")}, f"seed {seed}"
