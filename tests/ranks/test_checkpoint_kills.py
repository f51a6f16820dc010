"""Ranks killed at any instant, again and again: each life goes on from the newest complete generation."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoint_jobs import KillPlan, Plan, killed_from_outside, reached, train
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
        timeout_seconds=10.0,
    )


def folders(plan: Plan) -> list[Path]:
    assert plan.memory is not None
    assert plan.directory is not None
    return [*plan.memory.iterdir(), plan.directory]


def kill_plans(count: int, seed: int) -> Iterator[KillPlan]:
    chance = random.Random(seed)
    for number in range(count):
        place = PLACES[number % len(PLACES)]
        # The first life certifies something, so that the others have something to go back to.
        seconds = chance.uniform(0.8, 1.2) if number == 0 else chance.uniform(0, 0.6)
        delay = chance.uniform(0, 0.004) if place == "capture" else chance.uniform(0, 0.0005)
        yield KillPlan(WHO[number % len(WHO)], seconds, place, delay)


def kill_and_restart(plan: Plan, count: int, seed: int) -> None:
    """``count`` lives or more, until one was killed while it wrote a file and one has resumed."""
    history, unwritten = History(RANKS), 0
    assert plan.directory is not None
    for number, kills in enumerate(kill_plans(5 * count, seed)):
        expected = newest_complete(folders(plan), RANKS) if number else 0
        life = replace(plan, run_dir=plan.directory.parent / f"life-{number}")
        with killed_from_outside(life, kills), pytest.raises(RankError) as raised:
            run_ranks(train, RANKS, life, timeout=60)
        message = str(raised.value)
        assert message.count("exit code -9") == len(kills.ranks), f"life {number}, {kills}: {message}"
        history.add_run(life, expected)
        unwritten += bool([*plan.directory.rglob("step-*/.*.writing")])
        if number + 1 >= count and unwritten and history.resumed_from[-1] > 0:
            break
    assert history.resumed_from == sorted(history.resumed_from), "no life loses what an earlier one had"
    assert history.resumed_from[-1] > 0
    history.is_as_uninterrupted(plan)
    assert unwritten, "some were killed while they wrote files"


@pytest.mark.parametrize(
    "kills", [pytest.param(8, marks=pytest.mark.long), pytest.param(100, marks=pytest.mark.slow)]
)
def test_killed_at_any_instant_a_job_goes_on_from_its_newest_complete_generation(tmp_path: Path, kills: int):
    kill_and_restart(planned(tmp_path), kills, seed=kills)


@pytest.mark.long
def test_a_generation_is_given_up_only_when_the_next_is_sealed_on_every_rank(tmp_path: Path):
    """One rank has so much to seal that the other one would be two checks ahead of it."""
    plan = replace(planned(tmp_path), burden={1: 300 << 20}, persist_every=1000, run_dir=tmp_path / "run")
    with pytest.raises(RankError):
        run_ranks(train, RANKS, replace(plan, killed={0: 8, 1: 8}, after_update=True), timeout=60)
    expected = newest_complete(folders(plan), RANKS)
    assert expected >= 6
    again = replace(plan, steps=9, run_dir=tmp_path / "again")
    results = run_ranks(train, RANKS, again, timeout=60)
    assert [each.resumed and each.resumed.step for each in results] == [expected, expected]


SHORT, LONG = 6, 30


def instants(count: int, seed: int) -> Iterator[tuple[int, KillPlan]]:
    """How many steps the job has, and when it is killed: in its first steps, its last ones, or as it ends."""
    chance = random.Random(seed)
    for number in range(count):
        steps, first, seconds = {
            0: (LONG, chance.randrange(LONG), chance.uniform(0, 0.05)),
            1: (SHORT, SHORT - chance.randrange(1, 6), chance.uniform(0, 0.05)),
            2: (SHORT, SHORT, chance.uniform(0, 0.5)),
            3: (LONG, 0, chance.uniform(0, 0.1)),
        }[number % 4]
        yield steps, KillPlan(WHO[number % len(WHO)], seconds, step=first)


def starts_again(plan: Plan, alone: dict[int, list[dict[int, str]]], kills: KillPlan) -> int:
    """A killed job goes on from its newest sealed generation, or from its beginning, and ends as if it had
    not been killed; the step that it went on from."""
    assert plan.directory is not None
    life = replace(plan, run_dir=plan.run_dir / "first")
    with killed_from_outside(life, kills):
        try:
            run_ranks(train, RANKS, life, timeout=60)
        except RankError as error:  # or all ranks had ended before
            assert "exit code -9" in str(error), f"{kills}: {error}"  # noqa: PT017
    assert len(reached(life, 0)) > 0
    expected = newest_complete(folders(plan), RANKS)
    again = replace(plan, run_dir=plan.run_dir / "again")
    results = run_ranks(train, RANKS, again, timeout=60)
    for rank, each in enumerate(results):
        assert next(iter(reached(again, rank))) == expected, f"{kills}: {each.resumed}"
        assert each.bits == {
            step: bits for step, bits in alone[plan.steps][rank].items() if step > expected
        }, f"{kills}: not bitwise"
        assert each.failures == [], f"{kills}"
    return expected


@pytest.mark.slow
def test_two_hundred_kills_never_leave_a_job_that_cannot_start(tmp_path: Path):
    seed = int(os.environ.get("TORCHSCOUT_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"TORCHSCOUT_TEST_SEED={seed}")
    alone = {
        steps: [each.bits for each in run_ranks(train, RANKS, Plan("ddp", steps, interval=1), timeout=60)]
        for steps in (SHORT, LONG)
    }
    resumed_steps = []
    for number, (steps, kills) in enumerate(instants(200, seed)):
        folder = tmp_path / f"job-{number}"
        plan = replace(planned(folder), steps=steps, run_dir=folder / "run", persist_every=4)
        resumed_steps.append(starts_again(plan, alone, kills))
        shutil.rmtree(folder)
    assert 0 in resumed_steps, "some began anew"
    assert max(resumed_steps) > SHORT
