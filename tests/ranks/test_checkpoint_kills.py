"""Ranks killed at any instant, again and again: each life goes on from the newest complete generation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint_jobs import Doom, Plan, doomed, train
from tests.support.checkpoint_remains import History, newest_complete
from tests.support.ranks import RankError, run_ranks

RANKS = 2
PLACES = (None, "capture", "persist", None, "capture", "persist", None, None)
WHO = ((0, 1), (0, 1), (0, 1), (1,), (0,), (1,), (0,), (0, 1))


def planned(tmp_path: Path) -> Plan:
    return Plan(
        "ddp",
        100_000,
        interval=1,
        directory=tmp_path / "checkpoints",
        memory=tmp_path / "memory",
        patience_seconds=10.0,
    )


def folders(plan: Plan) -> list[Path]:
    assert plan.memory is not None
    assert plan.directory is not None
    return [*plan.memory.iterdir(), plan.directory]


def dooms(count: int, seed: int) -> Iterator[Doom]:
    chance = random.Random(seed)
    for number in range(count):
        place = PLACES[number % len(PLACES)]
        # The first life certifies something, so that the others have something to go back to.
        seconds = chance.uniform(0.8, 1.2) if number == 0 else chance.uniform(0, 0.6)
        delay = chance.uniform(0, 0.004) if place == "capture" else chance.uniform(0, 0.0005)
        yield Doom(WHO[number % len(WHO)], seconds, place, delay)


def lived(plan: Plan, count: int, seed: int) -> None:
    history, unwritten = History(RANKS), 0
    assert plan.directory is not None
    for number, doom in enumerate(dooms(count, seed)):
        expected = newest_complete(folders(plan), RANKS) if number else 0
        life = replace(plan, run_dir=plan.directory.parent / f"life-{number}")
        with doomed(life, doom), pytest.raises(RankError) as raised:
            run_ranks(train, RANKS, life, timeout=60)
        said = str(raised.value)
        assert said.count("exit code -9") == len(doom.ranks), f"life {number}, {doom}: {said}"
        history.heard(life, expected)
        unwritten += bool([*plan.directory.rglob("step-*/.*.writing")])
    assert history.came == sorted(history.came), "no life loses what an earlier one had"
    assert history.came[-1] > 0
    history.is_as_uninterrupted(plan)
    assert unwritten, "some were killed while they wrote files"


def test_killed_at_any_instant_a_job_goes_on_from_its_newest_complete_generation(tmp_path: Path):
    lived(planned(tmp_path), 8, seed=1)


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing_and_mix_nothing(tmp_path: Path):
    lived(planned(tmp_path), 100, seed=2)


def test_a_generation_is_given_up_only_when_the_next_is_sealed_on_every_rank(tmp_path: Path):
    """One rank has so much to seal that the other one would be two checks ahead of it."""
    plan = replace(planned(tmp_path), burden={1: 300 << 20}, persist_every=1000, run_dir=tmp_path / "run")
    with pytest.raises(RankError):
        run_ranks(train, RANKS, replace(plan, killed={0: 8, 1: 8}, after_update=True), timeout=60)
    expected = newest_complete(folders(plan), RANKS)
    assert expected >= 6
    again = replace(plan, steps=9, run_dir=tmp_path / "again")
    told = run_ranks(train, RANKS, again, timeout=60)
    assert [each.resumed and each.resumed.step for each in told] == [expected, expected]
