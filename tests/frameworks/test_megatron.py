"""The real Megatron-Core: meshes, replay without interference, faults named, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.megatron_jobs import Trial, answering
from tests.support.ranks import LiveRanks


@pytest.fixture(scope="module")
def four() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 4) as ranks:
        yield ranks


HEALTHY = {
    "replicas": Trial(),
}


@pytest.mark.parametrize("trial", [pytest.param(each, id=name) for name, each in HEALTHY.items()])
def test_training_is_bitwise_the_same_with_a_check_at_every_step(
    four: LiveRanks, trial: Trial, tmp_path: Path
):
    alone = four.ask((trial, None), 120)
    checked = four.ask((trial, tmp_path), 120)
    for plain, told in zip(alone, checked, strict=True):
        print(told.status, told.unchecked)
        assert (told.incidents, told.failures) == ([], [])
        assert told.bits == plain.bits
        assert told.agreed
