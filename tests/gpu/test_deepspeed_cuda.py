"""DeepSpeed as it is shipped, over NCCL: what one rank alone holds. The rest are contracts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from evaluation.jobs.deepspeed import SOME_SMALL, Setup, master, train
from tests.support.job_ranks import answering, overwritten, seen, surfaces
from tests.support.nccl_ranks import needs
from tests.support.ranks import LiveRanks

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3), needs("deepspeed")]


@pytest.fixture(scope="module")
def three() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 3, backend="nccl") as ranks:
        yield ranks


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_flipped_bit_in_what_one_rank_alone_updates_names_that_rank(
    three: LiveRanks, stage: int, tmp_path: Path
):
    job = partial(train, setup=Setup(stage, bf16=True, zero=SOME_SMALL if stage == 3 else {}))
    found = overwritten(job, master, three, tmp_path)[0].incidents
    assert (seen(found), surfaces(found)) == ([("sdc", "rank", (1,), 3)], {"state/owned"})
