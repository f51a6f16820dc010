"""Which times are compared with which, how sure a slow rank is, and what its incident says."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import pytest

from torchscout.c3.tree import Runs
from torchscout.config import BaselineConfig, StragglerConfig
from torchscout.decision.baseline import Slowness, Stragglers
from torchscout.decision.progress import Phase
from torchscout.decision.straggler import History, PhaseStragglers, RankStragglers, is_known
from torchscout.decision.timings import PeerTimes, Timings, Work
from torchscout.decision.types import Incident
from torchscout.mesh import Mesh
from torchscout.replay.recipe import Lap, Measured
from torchscout.session.replay.time_comparison import decode, encode

DEFAULTS = StragglerConfig()
MODULE = Work("time/module", "", ())
GRID = Mesh.grid(replica=3, tensor=2)
"""Tensor-parallel pairs (0, 1), (2, 3), (4, 5)."""

# What is compared.


def module(milliseconds: float, *laps: Lap, shape: tuple[int, ...] = (2, 8)) -> Measured:
    return Measured("layer.0", shape, {"time/module": milliseconds}, laps)


def all_reduce(members: tuple[int, ...], *milliseconds: float) -> Lap:
    return Lap("time/all_reduce@", members, 16, milliseconds)


def pairs(*laps: Sequence[float]) -> list[Measured]:
    """For each of six ranks, what it spent in its pair's collectives."""
    return [
        module(1.0, all_reduce((rank // 2 * 2, rank // 2 * 2 + 1), *each)) for rank, each in enumerate(laps)
    ]


def received(mesh: Mesh, measured: Sequence[Measured | None], step: int = 1) -> Timings:
    """What each rank sends, as it arrives; None from a rank without times."""
    sent = [encode([] if each is None else [each], mesh) for each in measured]
    layouts, columns = (Runs.joined([Runs.of(each) for each in part]) for part in zip(*sent, strict=True))
    return decode(step, mesh, Runs.decode(layouts.encode()), Runs.decode(columns.encode()))


def compared(mesh: Mesh, *measured: Measured | None) -> set[tuple[str, tuple[int, ...]]]:
    return {
        (each.work.surface, each.record(row).peers)
        for each in received(mesh, measured).computation(DEFAULTS)
        for row in np.flatnonzero(each.counts >= 2).tolist()
    }


def grouped(mesh: Mesh, measured: Sequence[Measured | None]) -> list[tuple[str, str, int, dict]]:
    found = received(mesh, measured).communication()
    return [(each.surface, each.axis, each.elements, each.milliseconds) for each in found]


def test_a_rank_without_times_is_left_out_and_not_called_slow():
    four = Mesh.grid(replica=4)
    assert compared(four, module(1.0), module(1.0), None, module(1.0)) == {("time/module", (0, 1, 3))}


def test_work_of_another_size_is_not_compared():
    sizes = [(2, 8), (2, 8), (2, 16), (2, 16)]
    found = compared(Mesh.grid(replica=4), *(module(1.0, shape=each) for each in sizes))
    assert found == {("time/module", (0, 1)), ("time/module", (2, 3))}


def test_two_replicas_of_shards_are_compared_together_and_their_updates_are_not():
    both = Measured("layer.0", (1,), {"time/module": 1.0, "time/optimizer": 1.0}, ())
    assert compared(Mesh.grid(replica=2, shard=2), *[both] * 4) == {
        ("time/module", (0, 1, 2, 3)),
        ("time/optimizer", (0, 2)),
        ("time/optimizer", (1, 3)),
    }


def test_experts_are_compared_among_the_ranks_that_have_the_same_ones():
    both = Measured("layer.0", (1,), {"time/module": 1.0, "time/experts": 1.0}, ())
    assert compared(Mesh.grid(replica=4).carve_experts(2), *[both] * 4) == {
        ("time/module", (0, 1, 2, 3)),
        ("time/experts", (0, 2)),
        ("time/experts", (1, 3)),
    }


def test_a_collective_took_what_its_last_member_saw_each_time():
    """In the first, rank 1 comes late; in the second, rank 0 does."""
    laps = pairs((250.0, 1.0), (2.0, 251.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    times = {(0, 1): 3.0, (2, 3): 2.0, (4, 5): 2.0}
    assert grouped(GRID, laps) == [("time/all_reduce@tensor", "tensor", 16, times)]


@pytest.mark.parametrize("partial", [[], [[1.0]]], ids=["no times", "fewer times"])
def test_a_group_of_which_a_member_is_missing_is_not_measured(partial: list[list[float]]):
    sent: list[Measured | None] = [*pairs(*[(1.0, 1.0)] * 3, *(partial or [()]), *[(1.0, 1.0)] * 2)]
    if not partial:
        sent[3] = None
    assert {members for *_, times in grouped(GRID, sent) for members in times} == {(0, 1), (4, 5)}


def test_a_stage_has_a_group_with_each_neighbour():
    """Two replicas of three stages in a ring."""
    mesh, rings = Mesh.grid(replica=2, pipeline=3), [[(0, 1), (1, 2), (0, 2)], [(3, 4), (4, 5), (3, 5)]]
    measured = [
        module(1.0, *(Lap("time/send@", ends, 16, (2.0,)) for ends in rings[rank // 3] if rank in ends))
        for rank in range(6)
    ]
    times = dict.fromkeys([*rings[0], *rings[1]], 2.0)
    assert [each[3] for each in grouped(mesh, measured)] == [times]


@pytest.mark.parametrize(
    ("members", "axis"),
    [((0, 1), "tensor"), ((2, 0), "shard"), ((1, 5), "replica"), ((0, 1, 2, 3), "shard+tensor")],
)
def test_a_group_is_named_by_its_axis(members: tuple[int, ...], axis: str):
    mesh = Mesh.grid(replica=2, shard=2, tensor=2)
    sent = [module(1.0, *[all_reduce(members, 1.0)] * (rank in members)) for rank in range(8)]
    assert [each[1] for each in grouped(mesh, sent)] == [axis]


def test_the_size_of_the_message_does_not_grow_with_the_group():
    lap = Lap("time/all_gather", tuple(range(512)), 100, (1.0,))
    assert sum(map(len, encode([module(1.0, lap)], Mesh.grid(shard=512)))) < 200


def test_a_column_that_does_not_fit_its_layout_is_refused():
    layout, column = encode([module(1.0)], GRID)
    with pytest.raises(ValueError, match="1 of 1 ranks sent 16 bytes for 1 times"):
        decode(1, Mesh.grid(), Runs.of(layout), Runs.of(2 * column))
    with pytest.raises(ValueError, match="format 7"):
        decode(1, Mesh.grid(), Runs.of(b"[7]"), Runs.of(b""))


# Times that are taken again.

QUIET = pairs(*[(1.0, 1.0)] * 6)
ONE_SLOW = [module(251.0, *each.laps) if rank == 2 else each for rank, each in enumerate(QUIET)]


class Checks:
    def __init__(self, rank: int = 0) -> None:
        self._stragglers = Stragglers(GRID, rank, DEFAULTS, BaselineConfig(warmup=3))
        self.step = 0

    def doubts(self, measured: Sequence[Measured]) -> bool:
        layers = self._stragglers.layers_to_time_again(received(GRID, measured, self.step + 1))
        assert layers <= {"layer.0"}
        return bool(layers)

    def observe(self, measured: Sequence[Measured]) -> Slowness:
        self.step += 1
        return self._stragglers.observe(received(GRID, measured, self.step))


def test_a_straggler_is_timed_again_before_it_is_reported():
    checks = Checks()
    for measured in (*[QUIET] * 3, ONE_SLOW):
        assert not checks.doubts(measured), "slow once, which is not reported"
        assert checks.observe(measured).incidents == []
    assert checks.doubts(ONE_SLOW)
    (incident,) = checks.observe(ONE_SLOW).incidents
    assert incident.ranks == (2,)
    assert not checks.doubts(ONE_SLOW), "reported: there is nothing to find out"


def test_a_rank_that_is_fast_when_it_is_timed_again_is_not_reported():
    checks = Checks()
    for measured, is_doubted in zip([QUIET, QUIET, *[ONE_SLOW] * 4], [0, 0, 0, 1, 0, 1], strict=True):
        assert checks.doubts(measured) == bool(is_doubted)
        assert checks.observe(QUIET if is_doubted else measured).incidents == []


def test_a_shared_slowdown_is_timed_again_before_it_is_reported():
    checks, slow = Checks(), [module(20.0, *each.laps) for each in QUIET]
    assert not checks.doubts(slow), "nothing is usual yet"
    for measured in [*[QUIET] * 4, *[slow] * 2]:
        assert not checks.doubts(measured)
        assert checks.observe(measured).incidents == []
    assert checks.doubts(slow)
    assert [each.scope.value for each in checks.observe(slow).incidents] == ["job"]


def test_records_are_those_this_rank_takes_part_in():
    found = Checks(rank=3).observe(QUIET).records
    assert {(each.surface, each.peers) for each in found} == {
        ("time/module", (1, 3, 5)),
        ("time/all_reduce@tensor", (0, 2, 4)),
    }


# How sure it is.


def of(times: Sequence[float], step: int = 1, config: StragglerConfig = DEFAULTS) -> PeerTimes:
    return PeerTimes(step, MODULE, np.arange(len(times))[np.newaxis], np.array([times]), config)


def noise(rng: np.random.Generator, rounds: int, peers: int, sigma: float = 0.1, random: float = 0.0):
    """Times around 50 ms; a share of ``random`` rank-rounds takes three times as long."""
    times = 50 * rng.lognormal(0, sigma, (rounds, peers))
    return np.where(rng.random(times.shape) < random, 3 * times, times)


def named(stragglers: RankStragglers, rounds: Iterable[Sequence[float]]) -> list[tuple[int, ...]]:
    return [found.ranks for times in rounds for found in stragglers.observe([of(times)])]


def fresh(peers: int) -> RankStragglers:
    return RankStragglers(Mesh.grid(replica=peers), DEFAULTS)


def hits(
    rng: np.random.Generator,
    start: Callable[[], RankStragglers],
    peers: int,
    trials: int,
    sigma: float,
    factor: float,
    random: float,
) -> float:
    """In which share of trials exactly the straggler is named, within four rounds of its first."""
    found = 0
    for _ in range(trials):
        rounds, rank = noise(rng, 4, peers, sigma, random), int(rng.integers(peers))
        rounds[:, rank] *= factor
        answer = named(start(), rounds)
        assert set(answer) <= {(rank,)}, "nobody else is ever named"
        found += answer == [(rank,)]
    return found / trials


@pytest.mark.parametrize("random", [0.0, 0.01], ids=["quiet", "random"])
@pytest.mark.parametrize("peers", [2, 3, 4, 8, 64])
def test_healthy_ranks_are_hardly_ever_reported(peers: int, random: float):
    """Times that are taken again are not simulated here, which a rank that is slow by chance would pass."""
    rounds = noise(np.random.default_rng(peers), 1000, peers, random=random)
    assert len(named(fresh(peers), rounds)) <= (1 if random else 0)


@pytest.mark.parametrize("random", [0.0, 0.01], ids=["quiet", "random"])
@pytest.mark.parametrize(("sigma", "factor"), [(0.1, 2.0), (0.01, 1.15)])
@pytest.mark.parametrize(
    ("peers", "from_the_start", "later"),
    [(3, 0.1, 0.85), (4, 0.6, 0.9), (8, 0.8, 0.98), (64, 0.98, 0.98)],
)
def test_how_often_a_straggler_is_named_within_four_rounds(
    peers: int, from_the_start: float, later: float, sigma: float, factor: float, random: float
):
    """Few peers know little about their noise: three of them mostly need more rounds in a new job."""
    rng, trials = np.random.default_rng(peers), 25 if peers == 64 else 60
    what = {"peers": peers, "trials": trials, "sigma": sigma, "factor": factor, "random": random}
    assert hits(rng, partial(fresh, peers), **what) >= from_the_start
    experienced = fresh(peers)
    # A rank that happens to be slow just now would be a second suspect from the start.
    rounds = [*noise(rng, 60, peers, sigma, random), *noise(rng, 1, peers, 0.001)]
    assert named(experienced, rounds) == []
    assert hits(rng, partial(pickle.loads, pickle.dumps(experienced)), **what) >= later


def steady(peers: int, slow: Iterable[int] = (), factor: float = 2.0) -> list[float]:
    """One quiet round in which some ranks are slow."""
    return [(50 + 0.1 * (rank % 3)) * (factor if rank in slow else 1) for rank in range(peers)]


def run(history: History, rounds: Iterable[Sequence[float]], config: StragglerConfig = DEFAULTS):
    """(round, rank) of every confirmed run, rounds counted from 1."""
    confirmed = (
        (number, history.observe([of(times, number, config)])) for number, times in enumerate(rounds, 1)
    )
    return [(number, slow.rank) for number, runs in confirmed for slow in runs]


def test_a_restless_job_needs_more_rounds():
    history = History(DEFAULTS, 8)
    assert run(history, [steady(8, {3 + number % 5} if number % 2 else ()) for number in range(60)]) == []
    ((number, rank),) = run(history, [steady(8, {1})] * 10)
    assert (rank, number > 3) == (1, True)


@pytest.mark.parametrize(("ranks", "rounds"), [(8, 2), (3072, 3), (100_000, 4)])
def test_a_large_job_needs_more_rounds(ranks: int, rounds: int):
    assert run(History(DEFAULTS, ranks), [steady(8, {1})] * 10) == [(rounds, 1)]


def test_a_slow_machine_is_found_whole_and_soon():
    machine = range(8, 16)
    assert run(History(DEFAULTS, 64), [steady(64, machine)] * 6) == [(4, rank) for rank in machine]


def test_only_outliers_of_a_verdict_are_named():
    history = History(DEFAULTS, 8)
    assert run(history, [steady(8)] * 50) == []
    assert run(history, [[30.0, 38.0, 46.0, 54.0, 62.0, 70.0, 78.0, 86.0]] * 10) == []


def test_the_round_of_one_straggler_does_not_widen_its_own_scale():
    """Among four, a straggler's time would take part in the median of the deviations."""
    history, wide = History(DEFAULTS, 4), [[48.0, 50.0, 52.0, 50.0]] * 20
    assert run(history, wide) == []
    assert run(history, [[48.0, 50.0, 52.0, 90.0]] * 4) == [(2, 3)]


def test_of_two_peers_who_always_differ_the_difference_is_no_noise():
    assert run(History(DEFAULTS, 2), [[50.0, 100.0], [50.5, 100.0], [50.0, 101.0], [50.0, 100.0]] * 2) != []
    assert run(History(DEFAULTS, 2), [[50.0, 57.0], [57.0, 50.0], [49.0, 57.0], [57.0, 50.0]] * 10) == []


def test_confirmed_and_unconfirmed_stragglers():
    history = History(DEFAULTS, 8)
    run(history, [steady(8, {1})] * 3 + [steady(8, {1, 2})])
    assert (history.confirmed, history.unconfirmed) == ({1}, {2})
    run(history, [steady(8)])
    assert (history.confirmed, history.unconfirmed) == (set(), set())


@pytest.mark.parametrize(
    ("setting", "rounds"),
    [({}, 2), ({"confirmations": 4}, 4), ({"false_alarm_rate": 1e-3}, 2), ({"false_alarm_rate": 1e-8}, 4)],
)
def test_how_many_rounds_a_straggler_is_watched_can_be_set(setting: dict, rounds: int):
    config = StragglerConfig(**setting)
    assert run(History(config, 8), [steady(8, {1})] * 10, config) == [(rounds, 1)]


@pytest.mark.parametrize("setting", [{"min_slowdown_ratio": 1.05}, {"min_slowdown_ms": 0.5}])
def test_what_counts_as_slower_can_be_set(setting: dict):
    """By 8% of 50 ms, and by 0.9 ms of 2 ms."""
    rounds = [[50.0, 50.1, 54.0, 49.9] if "min_slowdown_ratio" in setting else [2.0, 2.01, 2.9, 1.99]] * 9
    config = StragglerConfig(**setting)
    assert run(History(DEFAULTS, 4), rounds) == []
    assert [rank for _, rank in run(History(config, 4), rounds, config)] == [2]


@pytest.mark.parametrize(("kappa", "named"), [(2.0, (4,)), (5.0, ())])
def test_peers_are_compared_by_the_kappa_that_was_asked_for(kappa: float, named: tuple[int, ...]):
    times = of([100.0, 101.0, 102.0, 103.0, 107.0], config=StragglerConfig(kappa=kappa))
    assert times.record(0).ranks == named


@pytest.mark.parametrize(
    "wrong", [{"false_alarm_rate": 0.0}, {"false_alarm_rate": 1.0}, {"history": 0}], ids=str
)
def test_a_wrong_setting_is_refused(wrong: dict):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        StragglerConfig(**wrong)


# What an incident says.


def test_an_incident_says_who_is_slow_in_what_and_by_how_much():
    stragglers = RankStragglers(Mesh.grid(replica=4, hosts=["a", "a", "b", "b"]), DEFAULTS)
    found = [stragglers.observe([of(steady(4, {2}), step)]) for step in (7, 9, 11)]
    ((incident,),) = [each for each in found if each]
    assert (incident.step, incident.ranks, incident.hosts, incident.scope.value) == (9, (2,), ("b",), "rank")
    facts = (
        "Rank 2",
        "on b",
        "time/module",
        "100.4 ms against 50.0 ms among 4 peers",
        "2 rounds since step 7",
    )
    assert [fact for fact in facts if fact not in incident.sentence] == []
    assert [record.step for record in incident.records] == [9, 7]


def slow_from(step: int, phase: Phase = Phase.INPUT, slow: int = 3, mesh: Mesh | None = None) -> Incident:
    """What a hub reports whose surveys were at this step and every four steps."""
    mesh = mesh or Mesh.grid(replica=4, hosts=["node-0", "node-0", "node-1", "node-1"])
    found = PhaseStragglers(mesh, StragglerConfig(min_slowdown_ms=10.0))
    times = {rank: 410.0 if rank == slow else 18.0 for rank in range(4)}
    surveys = [found.observe(step + later, {phase: times}) for later in (0, 4, 8)]
    assert [len(each) for each in surveys] == [0, 1, 0]
    return surveys[1][0]


def test_an_incident_says_who_is_slow_in_a_phase_and_by_how_much():
    incident = slow_from(5)
    assert (incident.step, incident.ranks, incident.hosts) == (9, (3,), ("node-1",))
    assert incident.records[0].surface == "time/input"
    assert all(fact in incident.sentence for fact in ("Rank 3", "node-1", "410 ms", "18 ms", "step 5"))


def test_what_two_hubs_find_is_one_incident_until_the_rank_was_fast():
    known = slow_from(5)
    assert [is_known(slow_from(step), known) for step in (3, 7, 9, 10)] == [True, True, True, False]
    assert not is_known(slow_from(7, Phase.CHECKPOINT_WRITE), known)
    assert not is_known(slow_from(7, slow=2), known)


def test_replicas_with_different_experts_still_fetch_alike():
    assert slow_from(5, mesh=Mesh.grid(replica=4).carve_experts(4)).ranks == (3,)
