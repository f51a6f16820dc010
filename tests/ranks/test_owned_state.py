"""State with one owner is watched at every step, between checks too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation.jobs.job import Trial
from tests.support.ranks import LiveRanks
from tests.support.resting_jobs import Resting, resting


@pytest.fixture(scope="module")
def four() -> Iterator[LiveRanks]:
    with LiveRanks(resting, 4) as ranks:
        yield ranks


def trial(run_dir: Path, *, interval: int = 5, flip: tuple[int, int] | None = None, **replay: Any) -> Trial:
    return Trial(steps=20, run_dir=run_dir, interval=interval, flip=flip, replay=replay)


@pytest.mark.slow_except("12-exp_avg-*", "11-weight-tensor-parallel")
@pytest.mark.parametrize("layout", ["fsdp2", "tensor-parallel"])
@pytest.mark.parametrize(
    ("step", "what"), [(13, "weight"), (11, "weight"), (12, "exp_avg"), (15, "exp_avg_sq")]
)
def test_a_flip_between_two_checks_names_its_rank_and_is_not_certified(
    four: LiveRanks, layout: str, step: int, what: str, tmp_path: Path
):
    found = four.ask(Resting(trial(tmp_path, flip=(2, step)), layout, what), 120)
    assert [each.changed for each in found] == [0, 0, 1, 0]
    (incident,) = found[0].incidents
    assert (incident.scope.value, incident.ranks, incident.step) == ("rank", (2,), 15)
    assert incident.records[0].surface == "state/owned"
    for each in found:
        assert each.failures == []
        # Before step 11 the flip may have come before what was captured after step 10 was copied.
        assert each.certified == (5 if step == 11 else 10)


@pytest.mark.slow_cases("counted-0.5-20", "counted-1.0-None", "data-1.0-None")
@pytest.mark.parametrize(("watched", "certified"), [(1.0, None), (0.5, 20)])
@pytest.mark.parametrize("clipped", ["counted", "data"])
def test_what_training_writes_to_between_updates_is_not_watched_and_the_user_may_accept_that(
    four: LiveRanks, clipped: str, watched: float, certified: int | None, tmp_path: Path
):
    found = four.ask(Resting(trial(tmp_path, watched=watched), clipped=clipped), 120)
    said = [line for each in found for line in each.log if "certification needs 100%" in line]
    assert len(said) == (certified is None), "once in the job"
    for each in found:
        assert (each.incidents, each.failures) == ([], [])
        assert each.certified == certified
        assert 0.9 < each.status["replay"]["watched"] < 1
        if certified is None:
            assert "state/owned" in each.status["replay"]["held_up"]


@pytest.mark.long
def test_a_write_that_all_ranks_make_once_names_nobody(four: LiveRanks, tmp_path: Path):
    for each in four.ask(Resting(trial(tmp_path, interval=1), clipped="once"), 120):
        assert (each.incidents, each.failures) == ([], [])


def test_a_budget_limits_watching_to_a_part_at_a_time_and_is_reported(four: LiveRanks, tmp_path: Path):
    for each in four.ask(Resting(trial(tmp_path, watch_budget=1e-6)), 120):
        assert (each.incidents, each.failures) == ([], [])
        assert each.certified is None
        assert 0 < each.status["replay"]["watched"] < 1


def test_unchanged_state_is_watched_as_a_whole(four: LiveRanks, tmp_path: Path):
    for each in four.ask(Resting(trial(tmp_path)), 120):
        assert (each.incidents, each.failures, each.status["replay"]["held_up"]) == ([], [], {})
        assert (each.certified, each.status["replay"]["watched"]) == (20, 1.0)
        assert each.status["replay"]["covered"]["watched"] == 1.0
