"""Over NCCL: state with one owner is watched at every step; hidden collectives are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation.jobs.job import Trial
from tests.support.hidden_collectives import HIDING, hiding_training
from tests.support.ranks import LiveRanks
from tests.support.resting_jobs import Resting, resting
from torchscout.config import ReplayConfig

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(4)]


@pytest.fixture(scope="module")
def watched() -> Iterator[LiveRanks]:
    with LiveRanks(resting, 4, backend="nccl") as ranks:
        yield ranks


def trial(run_dir: Path, **more: Any) -> Trial:
    return Trial(steps=20, run_dir=run_dir, interval=5, **more)


@pytest.mark.parametrize("layout", ["fsdp2", "tensor-parallel"])
@pytest.mark.parametrize(("step", "what"), [(13, "weight"), (11, "weight"), (14, "exp_avg")])
def test_a_flip_between_two_checks_names_its_rank_and_is_not_certified(
    watched: LiveRanks, layout: str, step: int, what: str, tmp_path: Path
):
    found = watched.ask(Resting(trial(tmp_path, flip=(2, step)), layout, what), 90)
    assert [each.changed for each in found] == [0, 0, 1, 0]
    (incident,) = found[0].incidents
    assert (incident.scope.value, incident.ranks, incident.step) == ("rank", (2,), 15)
    assert incident.records[0].surface == "state/owned"
    for each in found:
        assert each.failures == []
        # Before step 11 the flip may have come before what was captured after step 10 was copied.
        assert each.certified == (5 if step == 11 else 10)


@pytest.mark.parametrize("clipped", ["counted", "data"])
def test_what_training_writes_between_updates_names_nobody(watched: LiveRanks, clipped: str, tmp_path: Path):
    for each in watched.ask(Resting(trial(tmp_path, replay={"watched": 0.5}), clipped=clipped), 90):
        assert (each.incidents, each.failures, each.certified) == ([], [], 20)


@pytest.fixture(scope="module")
def hiding() -> Iterator[LiveRanks]:
    with LiveRanks(hiding_training, 3, backend="nccl") as ranks:
        yield ranks


@pytest.mark.parametrize("place", HIDING)
def test_training_with_hidden_collectives_is_left_as_it_is(hiding: LiveRanks, place: str, tmp_path: Path):
    config = ReplayConfig(
        interval=3, recipes=("replicated_state", "embedding", "layer", "output", "optimizer")
    )
    plain = hiding.ask((place, 10, None, tmp_path / "plain"), 90)
    seen = hiding.ask((place, 10, config, tmp_path / "seen"), 90)
    for alone, with_scout in zip(plain, seen, strict=True):
        assert with_scout.collectives == alone.collectives
        assert with_scout.bits == alone.bits
        assert (with_scout.incidents, with_scout.failures) == ([], [])
        assert with_scout.certified is not None
        reasons = [each for each in with_scout.not_checked.values() if "must not repeat" in each]
        assert reasons, with_scout.not_checked
