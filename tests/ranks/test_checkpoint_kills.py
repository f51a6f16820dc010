"""Ranks killed at any instant, again and again: each life goes on from the newest complete generation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.support.checkpoint_jobs import Doom, Plan, doomed, reached, train
from tests.support.ranks import RankError, run_ranks
from torchscout.checkpoint import ledger, shards
from torchscout.checkpoint.generation import Generation

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


def ledgers(plan: Plan, rank: int) -> ledger.CheckpointGate | None:
    """What a rank had written down last."""
    assert plan.memory is not None
    assert plan.directory is not None
    found = [ledger.read(folder, rank) for folder in (*plan.memory.iterdir(), plan.directory)]
    known = [each for each in found if each is not None]
    return ledger.newest(known) if known else None


def whole(plan: Plan) -> dict[Generation, set[int]]:
    """Whose state is there, every bit of it, for each generation."""
    assert plan.memory is not None
    assert plan.directory is not None
    found: dict[Generation, set[int]] = {}
    for folder in (plan.memory, plan.directory):
        for path in folder.rglob("*.shard"):
            report = shards.verify(path)
            assert report.whole, f"a file under a sealed name is not whole: {report.problems}"
            assert report.header is not None
            found.setdefault(report.header.identity.generation, set()).add(report.header.identity.rank)
    return found


def newest_complete(plan: Plan) -> int:
    """Of those that every rank has certified; 0 if there is none."""
    gates = [ledgers(plan, rank) for rank in range(RANKS)]
    known = [each for each in gates if each is not None]
    if not known:
        return 0
    last = max(gate.lineage for gate in known)
    certified = set.intersection(*(set(gate.trusted) for gate in known if gate.lineage == last))
    complete = [
        each for each, ranks in whole(plan).items() if ranks == set(range(RANKS)) and each in certified
    ]
    return max((each.step for each in complete), default=0)


@dataclass
class History:
    """Of lives that follow each other."""

    known: dict[int, list[str | None]] = field(default_factory=dict)
    """Each step's state on each rank, whoever did it first."""
    unwritten: int = 0
    """Kills that left a file half written, on the disk."""
    came: list[int] = field(default_factory=list)
    """The steps that lives began with."""

    def lives(self, plan: Plan, dooms: Iterator[Doom]) -> None:
        for number, doom in enumerate(dooms):
            expected = newest_complete(plan) if number else 0
            life = replace(plan, run_dir=plan.directory.parent / f"life-{number}")
            with doomed(life, doom), pytest.raises(RankError) as raised:
                run_ranks(train, RANKS, life, timeout=60)
            assert str(raised.value).count("exit code -9") == len(doom.ranks), raised.value
            self._heard(life, expected)
            assert plan.directory is not None
            self.unwritten += bool([*plan.directory.rglob("step-*/.*.writing")])

    def _heard(self, life: Plan, expected: int) -> None:
        for rank in range(RANKS):
            steps = reached(life, rank)
            assert next(iter(steps)) == expected, "it began with the newest complete generation"
            for step, bits in steps.items():
                states = self.known.setdefault(step, [None] * RANKS)
                states[rank] = states[rank] or bits
                assert states[rank] == bits, f"rank {rank} has another state at step {step} than before"
        self.came.append(expected)


def dooms(count: int, seed: int) -> Iterator[Doom]:
    chance = random.Random(seed)
    for number in range(count):
        place = PLACES[number % len(PLACES)]
        # The first life certifies something, so that the others have something to go back to.
        seconds = chance.uniform(0.8, 1.2) if number == 0 else chance.uniform(0, 0.6)
        delay = chance.uniform(0, 0.004) if place == "capture" else chance.uniform(0, 0.0005)
        yield Doom(WHO[number % len(WHO)], seconds, place, delay)


def lived(plan: Plan, count: int, seed: int) -> None:
    history = History()
    history.lives(plan, dooms(count, seed))
    assert history.came == sorted(history.came), "no life loses what an earlier one had"
    assert history.came[-1] > 0
    last = max(history.known)
    alone = run_ranks(train, RANKS, replace(plan, directory=None, steps=last), timeout=300)
    for step, states in history.known.items():
        for rank, bits in enumerate(states):
            if bits is not None and step > 0:
                assert bits == alone[rank].bits[step], f"step {step} is not what an uninterrupted job has"
    assert history.unwritten, "some were killed while they wrote files"


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
    expected = newest_complete(plan)
    assert expected >= 6
    again = replace(plan, steps=9, run_dir=tmp_path / "again")
    told = run_ranks(train, RANKS, again, timeout=60)
    assert [each.resumed and each.resumed.step for each in told] == [expected, expected]
