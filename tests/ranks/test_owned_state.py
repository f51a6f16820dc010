"""State with one owner is watched at every step, between checks too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import LiveRanks
from tests.support.resting_jobs import Resting, resting
from torchscout.config import ReplayConfig


@pytest.fixture(scope="module")
def four() -> Iterator[LiveRanks]:
    with LiveRanks(resting, 4) as ranks:
        yield ranks


@pytest.mark.slow_cases(
    "10-weight-fsdp2",
    "12-weight-fsdp2",
    "12-weight-tensor",
    "13-exp_avg-fsdp2",
    "13-exp_avg-tensor",
    "14-exp_avg_sq-fsdp2",
)
@pytest.mark.parametrize("layout", ["fsdp2", "tensor"])
@pytest.mark.parametrize(
    ("step", "what"), [(12, "weight"), (10, "weight"), (13, "exp_avg"), (14, "exp_avg_sq")]
)
def test_a_flip_between_two_checks_names_its_rank_and_is_not_certified(
    four: LiveRanks, layout: str, step: int, what: str, tmp_path: Path
):
    found = four.ask(Resting(tmp_path, layout, flip=(2, step, what)), 60)
    assert [each.fired for each in found] == [0, 0, 1, 0]
    (incident,) = found[0].incidents
    assert (incident.scope.value, incident.ranks, incident.step) == ("rank", (2,), 15)
    assert incident.records[0].surface == "state/owned"
    for each in found:
        assert each.failures == []
        # After step 10 the flip may have come before what was captured then was copied.
        assert each.replay["certified"] == (5 if step == 10 else 10)


@pytest.mark.long_cases("fsdp2")
@pytest.mark.parametrize("layout", ["fsdp2", "tensor"])
def test_unchanged_state_is_certified(four: LiveRanks, layout: str, tmp_path: Path):
    for each in four.ask(Resting(tmp_path, layout), 60):
        assert (each.incidents, each.failures, each.replay["held_up"]) == ([], [], {})
        assert (each.replay["certified"], each.replay["watched"]) == (20, 1.0)
        assert each.replay["covered"]["watched"] == 1.0


@pytest.mark.slow_cases("counted-0.5-20", "counted-1.0-None", "data-1.0-None")
@pytest.mark.parametrize(("watched", "certified"), [(1.0, None), (0.5, 20)])
@pytest.mark.parametrize("clipped", ["counted", "data"])
def test_what_training_writes_to_between_updates_is_not_watched_and_the_user_may_accept_that(
    four: LiveRanks, clipped: str, watched: float, certified: int | None, tmp_path: Path
):
    config = ReplayConfig(interval=5, watched=watched)
    for each in four.ask(Resting(tmp_path, clipped=clipped, replay=config), 60):
        assert (each.incidents, each.failures) == ([], [])
        assert each.replay["certified"] == certified
        assert 0.9 < each.replay["watched"] < 1
        if certified is None:
            assert "of the state with one owner was watched" in each.replay["held_up"]["state/owned"]


@pytest.mark.long
def test_a_write_that_all_ranks_make_once_names_nobody(four: LiveRanks, tmp_path: Path):
    for each in four.ask(Resting(tmp_path, clipped="once", replay=ReplayConfig(interval=1)), 60):
        assert (each.incidents, each.failures) == ([], [])


def test_a_budget_limits_watching_to_a_part_at_a_time_and_is_reported(four: LiveRanks, tmp_path: Path):
    config = ReplayConfig(interval=5, watch_budget=1e-6)
    for each in four.ask(Resting(tmp_path, replay=config), 60):
        assert (each.incidents, each.failures) == ([], [])
        assert each.replay["certified"] is None
        assert each.replay["watched"] is not None
        assert 0 < each.replay["watched"] < 1
