"""The figures that ``persistence`` promises, and the reasons behind its rules."""

import pickle
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest

from torchscout.config import StragglerConfig
from torchscout.decision.consensus import statistical
from torchscout.decision.straggler.persistence import Chance, Persistence, Spread
from torchscout.decision.straggler.ranks import RankStragglers
from torchscout.decision.types import EvidenceRecord, Manifestation
from torchscout.mesh import Mesh

SIZES = [8, 64, 128]
STRAGGLERS = [pytest.param(0.1, 2.0, id="2x in 10%"), pytest.param(0.01, 1.15, id="1.15x in 1%")]
RANDOM = [pytest.param(0.0, id="quiet"), pytest.param(0.01, id="random")]
STEPS = count()


def timed(times, surface="time/module"):
    return EvidenceRecord(
        step=next(STEPS),
        surface=surface,
        manifestation=Manifestation.STRAGGLER,
        peers=tuple(range(len(times))),
        verdict=statistical([float(time) for time in times]),
    )


def noise(rng, rounds, peers, *, sigma=0.1, random=0.0):
    """Times around 50 ms; a share of ``random`` rank-rounds takes three times as long."""
    times = 50 * rng.lognormal(0, sigma, (rounds, peers))
    return np.where(rng.random(times.shape) < random, 3 * times, times)


def named(diagnosis, rounds):
    return [incident.ranks for times in rounds for incident in diagnosis.observe([timed(times)])]


def fresh(peers):
    return RankStragglers(Mesh.grid(replica=peers), StragglerConfig())


def found(rng, start, peers, straggler, *, trials, sigma, random):
    """In how many trials exactly the straggler is named, within 4 rounds of its first."""
    hits = 0
    for _ in range(trials):
        rounds, rank = noise(rng, 4, peers, sigma=sigma, random=random), int(rng.integers(peers))
        rounds[:, rank] *= straggler
        hits += named(start(), rounds) == [(rank,)]
    return hits


def check_noise(peers, rounds, random, at_most):
    assert (
        len(named(fresh(peers), noise(np.random.default_rng(peers), rounds, peers, random=random))) <= at_most
    )


def check_fresh(peers, sigma, straggler, random, trials):
    rng = np.random.default_rng(peers)
    hits = found(rng, partial(fresh, peers), peers, straggler, trials=trials, sigma=sigma, random=random)
    assert hits >= 0.99 * trials


def check_after_history(peers, sigma, straggler, random, *, histories, trials):
    rng, hits = np.random.default_rng(peers), 0
    for _ in range(histories):
        diagnosis = fresh(peers)
        named(diagnosis, noise(rng, 199, peers, sigma=sigma, random=random))
        # A rank that happens to be slow just now would be a second suspect from the start.
        named(diagnosis, noise(rng, 1, peers, sigma=0.001))
        state = pickle.dumps(diagnosis)
        hits += found(
            rng, partial(pickle.loads, state), peers, straggler, trials=trials, sigma=sigma, random=random
        )
    assert hits >= 0.99 * histories * trials


LARGE = pytest.mark.slow_cases("128*", "64*")


@LARGE
@pytest.mark.parametrize(("random", "at_most"), [(0.0, 0), (0.01, 1)])
@pytest.mark.parametrize("peers", SIZES)
def test_healthy_ranks_are_rarely_reported(peers, random, at_most):
    check_noise(peers, 1500, random, at_most)


@LARGE
@pytest.mark.parametrize("random", RANDOM)
@pytest.mark.parametrize(("sigma", "straggler"), STRAGGLERS)
@pytest.mark.parametrize("peers", SIZES)
def test_a_straggler_is_named_within_four_rounds_from_the_first_or_after_a_long_history(
    peers, sigma, straggler, random
):
    check_fresh(peers, sigma, straggler, random, trials=200)
    trials = 100 if peers == 8 else 20
    check_after_history(peers, sigma, straggler, random, histories=1, trials=trials)


@pytest.mark.slow
@pytest.mark.parametrize(("random", "at_most"), [(0.0, 0), (0.01, 9)])
@pytest.mark.parametrize("peers", SIZES)
def test_healthy_ranks_are_reported_less_than_once_in_a_thousand_rounds(peers, random, at_most):
    check_noise(peers, 10_000, random, at_most)


@pytest.mark.slow
@pytest.mark.parametrize("random", RANDOM)
@pytest.mark.parametrize(("sigma", "straggler"), STRAGGLERS)
@pytest.mark.parametrize("peers", SIZES)
def test_a_thousand_stragglers(peers, sigma, straggler, random):
    check_fresh(peers, sigma, straggler, random, trials=1000)
    check_after_history(peers, sigma, straggler, random, histories=10, trials=100)


@pytest.mark.parametrize("peers", [3, 4])
def test_small_groups_are_no_storm_and_still_find_a_straggler(peers):
    """Three or four ranks know little about their noise: chance costs up to its configured share."""
    check_noise(peers, 4000, random=0.0, at_most=4)
    rng = np.random.default_rng(peers)
    hits = found(rng, partial(fresh, peers), peers, 2.0, trials=200, sigma=0.1, random=0.0)
    assert hits >= 190


# The reasons


def run(persistence, rounds):
    """(round, rank) of every confirmed run, rounds counted from 1."""
    confirmed = ((number, persistence.observe([timed(times)])) for number, times in enumerate(rounds, 1))
    return [(number, slow.rank) for number, runs in confirmed for slow in runs]


def steady(peers, slow=(), factor=2.0):
    """One quiet round in which some ranks are slow."""
    return [(50 + 0.1 * (rank % 3)) * (factor if rank in slow else 1) for rank in range(peers)]


def test_peer_groups_share_what_they_know_about_chance():
    """A pair is as restless as the 31 others, and would be reported for that if it were alone."""
    config = StragglerConfig()
    apart, together = [
        [Persistence(config, chance) for chance in chances]
        for chances in ([None] * 32, [Chance(config, ranks=64)] * 32)
    ]
    rng, reported = np.random.default_rng(0), {"apart": 0, "together": 0}
    for _ in range(20):
        step = next(STEPS)
        for pair, times in enumerate(noise(rng, 32, 2, sigma=0.06)):
            record = replace(timed(times), step=step, peers=(2 * pair, 2 * pair + 1))
            reported["apart"] += len(apart[pair].observe([record]))
            reported["together"] += len(together[pair].observe([record]))
    assert reported["together"] == 0
    assert reported["apart"] > 0
    slow = [replace(timed([50.0, 100.0]), step=next(STEPS)) for _ in range(6)]
    assert [run.rank for record in slow for run in together[0].observe([record])] == [1]


@pytest.mark.parametrize(("ranks", "rounds"), [(0, 2), (16, 3), (3072, 4)])
def test_small_peer_groups_of_a_large_job_need_more_rounds(ranks, rounds):
    assert Chance(StragglerConfig(), ranks).needed(0, peers=6) == rounds


def test_noise_of_other_peer_groups_counts_for_a_pair_that_has_none_of_its_own():
    config, restless = StragglerConfig(), Chance(StragglerConfig())
    restless.add_spreads([Spread(0, 0.05, 0.05)] * 8)
    differing = [[50.0, 57.5]] * 4
    assert run(Persistence(config), differing) == [(2, 1)]
    assert run(Persistence(config, restless), differing) == []


def test_a_restless_job_needs_more_rounds():
    restless = [steady(8, {3 + number % 5} if number % 2 else ()) for number in range(60)]
    persistence = Persistence(StragglerConfig())
    assert run(persistence, restless) == []
    ((number, rank),) = run(persistence, [steady(8, {1})] * 10)
    assert rank == 1
    assert number > 3


def test_a_slow_machine_is_found_whole_and_soon():
    machine = range(8, 16)
    confirmed = run(Persistence(StragglerConfig()), [steady(64, machine)] * 6)
    assert confirmed == [(4, rank) for rank in machine]


def test_only_outliers_of_a_verdict_are_named():
    persistence = Persistence(StragglerConfig())
    run(persistence, [steady(8)] * 50)
    wide = [30.0, 38.0, 46.0, 54.0, 62.0, 70.0, 78.0, 86.0]
    assert timed(wide).ranks == ()
    assert run(persistence, [wide] * 10) == []


def test_the_round_of_one_straggler_does_not_widen_its_own_scale():
    """Among four, a straggler's time would take part in the median of the deviations."""
    rounds = [[48.0, 50.0, 52.0, 58.5]] * 4
    assert timed(rounds[0]).ranks == ()
    assert run(Persistence(StragglerConfig(kappa=2.5)), rounds) == []
    named_once = [[48.0, 50.0, 52.0, 90.0], *rounds]
    assert run(Persistence(StragglerConfig(kappa=2.5)), named_once) == [(2, 3)]


def test_confirmed_and_unconfirmed_stragglers():
    persistence = Persistence(StragglerConfig())
    run(persistence, [steady(8, {1})] * 3 + [steady(8, {1, 2})])
    assert (persistence.confirmed, persistence.unconfirmed) == ({1}, {2})
    run(persistence, [steady(8)])
    assert (persistence.confirmed, persistence.unconfirmed) == (set(), set())


@pytest.mark.parametrize(
    ("setting", "rounds"),
    [({}, 2), ({"confirmations": 4}, 4), ({"false_alarm_rate": 1e-3}, 2), ({"false_alarm_rate": 1e-8}, 4)],
)
def test_how_many_rounds_a_straggler_is_watched_can_be_set(setting, rounds):
    assert run(Persistence(StragglerConfig(**setting)), [steady(8, {1})] * 10) == [(rounds, 1)]


@pytest.mark.parametrize("setting", [{"min_slowdown_ratio": 1.05}, {"min_slowdown_ms": 0.5}])
def test_what_counts_as_slower_can_be_set(setting):
    """By 8% of 50 ms, and by 0.9 ms of 2 ms."""
    rounds = [[50.0, 50.1, 54.0, 49.9] if "min_slowdown_ratio" in setting else [2.0, 2.01, 2.9, 1.99]] * 3
    assert run(Persistence(StragglerConfig()), rounds) == []
    assert run(Persistence(StragglerConfig(**setting)), rounds) == [(2, 2)]


@pytest.mark.parametrize(
    "wrong", [{"false_alarm_rate": 0.0}, {"false_alarm_rate": 1.0}, {"history": 0}], ids=str
)
def test_a_wrong_setting_is_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        StragglerConfig(**wrong)
