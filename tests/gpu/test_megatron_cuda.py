"""The real Megatron-Core over NCCL, as it is shipped: what one rank alone holds. The rest are contracts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from evaluation.jobs.megatron import Setup, slot, train
from tests.support.job_ranks import answering, overwritten, seen, surfaces
from tests.support.nccl_ranks import needs
from tests.support.ranks import LiveRanks

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(4), needs("megatron")]


@pytest.fixture(scope="module")
def four() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 4, backend="nccl") as ranks:
        yield ranks


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_flipped_bit_in_what_one_rank_alone_updates_names_that_rank(
    four: LiveRanks, tensor: int, tmp_path: Path
):
    job = partial(train, setup=Setup(tensor=tensor, sharded=True, dtype="bfloat16"))
    found = overwritten(job, slot, four, tmp_path)[0].incidents
    assert (seen(found), surfaces(found)) == ([("sdc", "rank", (1,), 3)], {"state/owned"})
