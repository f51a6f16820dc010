"""Replay issues no collective that it did not announce, wherever a module or an optimizer hides one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hidden_collectives import HIDING, hiding_training
from tests.support.ranks import LiveRanks
from torchscout.config import ReplayConfig

# Without transfers: they send scratch data over training's groups on purpose.
RECIPES = ("replicated_state", "embedding", "layer", "output", "optimizer")
STEPS = 13


@pytest.fixture(scope="module")
def three() -> Iterator[LiveRanks]:
    with LiveRanks(hiding_training, 3) as ranks:
        yield ranks


@pytest.mark.slow_cases("*-1", "step*", "forward, at*", "thread pool*")
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("place", HIDING)
def test_training_with_hidden_collectives_is_left_as_it_is(
    three: LiveRanks, place: str, interval: int, tmp_path: Path
):
    config = ReplayConfig(interval=interval, recipes=RECIPES)
    plain = three.ask((place, STEPS, None, tmp_path / "plain"), 60)
    seen = three.ask((place, STEPS, config, tmp_path / "seen"), 60)
    for alone, with_scout in zip(plain, seen, strict=True):
        assert with_scout.collectives == alone.collectives
        assert with_scout.bits == alone.bits
        assert with_scout.incidents == []
        assert with_scout.failures == []
        assert with_scout.certified is not None
        reasons = [each for each in with_scout.not_checked.values() if "must not repeat" in each]
        assert reasons, with_scout.not_checked
