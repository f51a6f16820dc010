"""Long lists are sent in few bytes, and arrive as they were."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from torchscout.utils.packed_lists import pack, unpack


@pytest.mark.parametrize(
    "document",
    [
        {"ranks": [*range(0, 131_072, 8)], "bitmap": [0] * 40_000 + [1] + [0] * 40_000},
        [[3, "x"]] * 500 + [[4, "x"]] + [[3, "x"]] * 500,
        {"peers": [*range(100)], "evidence": [None] * 99 + ["gone"], "nested": {"a": [[1] * 50] * 50}},
    ],
)
def test_regular_lists_take_few_bytes(document: Any):
    packed = json.dumps(pack(document))
    assert len(packed) < 300
    assert unpack(json.loads(packed)) == document


def test_any_document_arrives_as_it_was():
    rng = random.Random(0)
    scalars = [0, 1, -1, True, False, None, 1.0, 0.5, "1", "", 1 << 60]

    def made(depth: int) -> Any:
        kind = rng.random()
        if depth == 0 or kind < 0.3:
            return rng.choice(scalars)
        if kind < 0.5:
            return {str(place): made(depth - 1) for place in range(rng.randrange(4))}
        if kind < 0.7:
            return [made(depth - 1) for _ in range(rng.randrange(4))]
        return [each for _ in range(4) for each in [made(depth - 1)] * rng.randrange(12)]

    for _ in range(2_000):
        document = made(4)
        assert repr(unpack(json.loads(json.dumps(pack(document))))) == repr(document)


@pytest.mark.parametrize(
    "document",
    [
        {"list of runs": [[0, 1, 1 << 30]]},
        {"list of runs": [[0, 1, -1]]},
        {"list of repeats": [["x", 1 << 30]]},
        {"list of repeats": [["x", True]]},
        {"list of runs": [[0, 1]]},
    ],
)
def test_a_few_bytes_cannot_fill_the_memory(document: Any):
    with pytest.raises(ValueError, match=r"a list has more|not enough values"):
        unpack(document)
