"""Which targets a sweep replays together."""

from __future__ import annotations

import pytest

from torchscout.replay.recipe import SWEPT_TOGETHER as LIMIT
from torchscout.replay.sweep import rounds


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0], [[0]]),
        ([1, 2, 3], [[0, 1, 2]]),
        ([LIMIT], [[0]]),
        ([LIMIT] * 3, [[0], [1], [2]]),
        ([LIMIT // 2] * 5, [[0, 1], [2, 3], [4]]),
        ([1, 2 * LIMIT, 1, 1], [[0], [1], [2, 3]]),
        ([0, LIMIT, 0, 1], [[0, 1, 2], [3]]),
    ],
)
def test_targets_of_a_round_need_no_more_than_the_limit(sizes: list[int], expected: list[list[int]]):
    assert [[*each] for each in rounds(sizes)] == expected
