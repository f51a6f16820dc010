"""Which part of a whole tensor a rank holds: as DTensor computes it, for uneven and strided shards too."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from torchscout.checkpoint.reshard.parts import Part, is_covered, parts_of, shared
from torchscout.errors import CheckpointError
from torchscout.state.layout import placement_to_json
from torchscout.utils._torch import StridedShard


def test_parts_are_those_of_dtensor_and_cover_the_whole():
    source, interleaved = random.Random(0), 0

    def placement():
        return source.choice(
            [Shard(0), Shard(1), Replicate(), StridedShard(0, split_factor=source.randint(1, 4))]
        )

    for _ in range(500):
        shape, mesh = ([source.randint(low, high) for _ in range(2)] for low, high in ((0, 9), (1, 4)))
        placements = [placement(), placement()]
        found: set[tuple[Part, ...]] = set()
        for place in itertools.product(*map(range, mesh)):
            sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(place), placements)
            spelled = [placement_to_json(each) for each in placements]
            whole = {"shape": shape, "mesh": mesh, "coordinate": list(place), "placements": spelled}
            parts = parts_of(whole)
            assert sum(each.elements for each in parts) == math.prod(sizes), whole
            if len(parts) == 1:
                assert (parts[0].offsets, parts[0].sizes) == (offsets, sizes), whole
            interleaved += len(parts) > 1
            found.add(parts)
        assert is_covered(shape, [each for parts in found for each in parts]), (shape, mesh, placements)
    assert interleaved, "some strided shards are not one block"


def test_what_two_parts_share():
    first, second = Part((0, 2), (0, 0), (4, 3)), Part((3, 0), (0, 1), (2, 4))
    common = shared(first, second)
    assert common is not None
    assert common.source == (slice(3, 4), slice(0, 2))
    assert common.target == (slice(0, 1), slice(3, 5))
    assert shared(first, Part((4, 0), (0, 0), (1, 9))) is None


def test_a_partial_sum_is_refused():
    whole = {"shape": [4], "mesh": [2], "coordinate": [0], "placements": [placement_to_json(Partial())]}
    with pytest.raises(CheckpointError, match="partial sum"):
        parts_of(whole)
