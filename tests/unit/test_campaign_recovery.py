"""When a corrupted job counts as recovered: the step before the fault, on all ranks, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchscout.campaign.cells.recovery import STEPS, Counter, RecoveryRankResult, recovered
from torchscout.campaign.grading import Flaw, Grade

CORRUPTED = [RecoveryRankResult([], [], 3, 0, {1: "a", 2: f"b{rank}", 3: "spoilt"}) for rank in range(2)]
RESUMED = [
    RecoveryRankResult([], [], None, 2, {2: f"b{rank}", 3: "c", 4: "d", STEPS: "e"}) for rank in range(2)
]


def test_a_job_that_goes_on_from_the_step_before_is_recovered():
    assert recovered(3, CORRUPTED, RESUMED) == Grade()


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ({"poisoned": 4}, {}, "checkpoints are poisoned at step ['3', '4'], not at 3"),
        ({"poisoned": None}, {}, "checkpoints are poisoned at step ['3', 'None'], not at 3"),
        ({}, {"resumed": 3}, "ranks resumed from step [2, 3], not from 2"),
        ({}, {"digests": {2: "b0", STEPS: "e"}}, "rank 1 has other bits than after step 2"),
        ({}, {"digests": {2: "b1", 3: "c"}}, f"rank 1 reached step 3, not {STEPS}"),
    ],
)
def test_one_rank_that_differs_is_enough_to_fail(before: dict, after: dict, reason: str):
    first = [CORRUPTED[0], replace(CORRUPTED[1], **before)]
    second = [RESUMED[0], replace(RESUMED[1], **after)]
    assert recovered(3, first, second) == Grade(Flaw.NOT_RECOVERED, reason)


def test_the_callers_own_state_is_restored():
    counter, other = Counter(), Counter()
    for _ in range(3):
        counter.draw()
    other.load_state_dict(counter.state_dict())
    counter.draw()
    other.draw()
    assert other.state_dict() == counter.state_dict()
