"""Names in a sentence."""

from __future__ import annotations

import pytest

from torchscout.utils.text import listed, named


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a and b"),
        ([1, 2, 3, 4], "1, 2, 3 and 4"),
        ([1, 2, 3, 4, 5], "1, 2, 3 and 2 more"),
    ],
)
def test_listed(items: list[object], words: str):
    assert listed(items) == words


def test_named():
    assert named([5]) == "rank 5"
    assert named((1, 3)) == "ranks 1 and 3"
    assert named(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 13 more"
