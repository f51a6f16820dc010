"""Parameters that each update overwrites are watched until it begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.copying_jobs import Copying, copying
from tests.support.ranks import LiveRanks

WEIGHT = "stack.1.up/weight"
REASON = "not watched between updates: a collective writes to it between updates"


@pytest.fixture(scope="module")
def three() -> Iterator[LiveRanks]:
    with LiveRanks(copying, 3) as ranks:
        yield ranks


@pytest.mark.parametrize("step", [11, 13, 15])
def test_a_flip_that_the_next_update_overwrites_names_its_rank_and_is_not_certified(
    three: LiveRanks, step: int, tmp_path: Path
):
    found = three.ask(Copying(tmp_path, flip=(2, step)), 120)
    assert [each.fired for each in found] == [0, 0, 1]
    (incident,) = found[0].incidents
    assert (incident.scope.value, incident.ranks, incident.step) == ("rank", (2,), 15)
    assert {each.surface for each in incident.records} == {"state/owned"}
    for each in found:
        assert each.failures == []
        # Before step 11 the flip may have come before what was captured after step 10 was copied.
        assert each.replay["certified"] == (5 if step == 11 else 10)


def test_unchanged_copies_are_certified(three: LiveRanks, tmp_path: Path):
    for each in three.ask(Copying(tmp_path), 120):
        assert (each.incidents, each.failures) == ([], [])
        assert (each.replay["certified"], each.replay["watched"]) == (20, 1.0)
        assert each.replay["covered"]["watched"] == 1.0
        assert REASON not in each.replay["covered"]["missing"]


def test_a_write_by_a_collective_is_no_fault_though_one_rank_alone_sees_it(three: LiveRanks, tmp_path: Path):
    for each in three.ask(Copying(tmp_path, receives="once"), 120):
        assert (each.incidents, each.failures) == ([], [])
        assert each.replay["certified"] == 20
        assert each.replay["covered"]["watched"] == 1.0


def test_copies_that_collectives_write_are_named_as_not_covered_and_the_rest_is_certified(
    three: LiveRanks, tmp_path: Path
):
    found = three.ask(Copying(tmp_path, receives="always"), 120)
    for each in found:
        assert (each.incidents, each.failures) == ([], [])
        assert each.replay["certified"] == 20
    missing = [each.replay["covered"]["missing"] for each in found]
    assert [each.get(REASON) for each in missing] == [None, [WEIGHT], None]
    assert found[0].replay["covered"]["watched"] == 1.0
    assert 0.5 < found[1].replay["covered"]["watched"] < 1.0
