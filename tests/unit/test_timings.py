"""Which times are compared with which, and what a collective took where its members wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torchscout.c3.tree import Runs
from torchscout.config import BaselineConfig, StragglerConfig
from torchscout.decision.consensus import Status
from torchscout.decision.straggler.diagnosis import Stragglers
from torchscout.decision.straggler.measured import Lap, Measured, Table, axis_of, encode, tables
from torchscout.decision.straggler.timings import Timings
from torchscout.mesh import Mesh

GRID = Mesh.grid(replica=3, tensor=2)
"""Tensor-parallel pairs (0, 1), (2, 3), (4, 5)."""


def received_timings(mesh: Mesh, *measured: Measured | None) -> list[Table]:
    """What each rank sends, as it arrives; None from a rank without times."""
    sent = [encode([] if each is None else [each], mesh) for each in measured]
    layouts, columns = (Runs.joined([Runs.of(each) for each in part]) for part in zip(*sent, strict=True))
    return tables(Runs.decode(layouts.encode()), Runs.decode(columns.encode()))


def module(milliseconds: float, *laps: Lap, shape: tuple[int, ...] = (2, 8)) -> Measured:
    return Measured("layer.0", shape, {"time/module": milliseconds}, laps)


def all_reduce(members: tuple[int, ...], *milliseconds: float) -> Lap:
    return Lap("time/all_reduce@", members, 16, milliseconds)


def pairs(*laps: Sequence[float]) -> list[Measured]:
    """For each of six ranks, what it spent in its pair's collectives."""
    return [
        module(1.0, all_reduce((rank // 2 * 2, rank // 2 * 2 + 1), *each)) for rank, each in enumerate(laps)
    ]


def test_a_rank_without_times_is_left_out_and_not_called_slow():
    mesh = Mesh.grid(replica=4)
    timings = received_timings(mesh, module(1.0), module(1.0), None, module(1.0))
    (record,) = Timings(1, mesh, timings).computation
    assert (record.peers, record.status) == ((0, 1, 3), "agree")


def test_work_of_another_size_is_not_compared():
    mesh = Mesh.grid(replica=4)
    sizes = [(2, 8), (2, 8), (2, 16), (2, 16)]
    found = Timings(1, mesh, received_timings(mesh, *(module(1.0, shape=each) for each in sizes))).computation
    assert {each.peers for each in found} == {(0, 1), (2, 3)}


def test_a_collective_took_what_its_last_member_saw_each_time():
    """In the first, rank 1 comes late; in the second, rank 0 does."""
    laps = pairs((250.0, 1.0), (2.0, 251.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    times, records = Timings(1, GRID, received_timings(GRID, *laps)).communication()
    assert [(each.ranks, each.axis, each.surface, each.milliseconds, each.shape) for each in times] == [
        ((0, 1), "tensor", "time/all_reduce@tensor", 3.0, (16,)),
        ((2, 3), "tensor", "time/all_reduce@tensor", 2.0, (16,)),
        ((4, 5), "tensor", "time/all_reduce@tensor", 2.0, (16,)),
    ]
    assert {(each.peers, each.verdict.evidence) for each in records} == {
        ((0, 2, 4), (3.0, 2.0, 2.0)),
        ((1, 3, 5), (3.0, 2.0, 2.0)),
    }


@pytest.mark.parametrize("partial", [[], [[1.0]]], ids=["no times", "fewer times"])
def test_a_group_of_which_a_member_is_missing_is_not_measured(partial: list[list[float]]):
    sent: list[Measured | None] = [*pairs(*[(1.0, 1.0)] * 3, *(partial or [()]), *[(1.0, 1.0)] * 2)]
    if not partial:
        sent[3] = None
    times, records = Timings(1, GRID, received_timings(GRID, *sent)).communication()
    assert {each.ranks for each in times} == {(0, 1), (4, 5)}
    assert {each.peers for each in records} == {(0, 4), (1, 5)}


def test_a_stage_has_a_group_with_each_neighbour_and_its_own_time_is_the_slower():
    """Two replicas of three stages in a ring: the first stage has both others for neighbours."""
    mesh = Mesh.grid(replica=2, pipeline=3)

    def sent(one: int, other: int, milliseconds: float) -> Lap:
        return Lap("time/send@", (one, other), 16, (milliseconds,))

    timings = [
        module(1.0, *(sent(*ends, 9.0 if ends == (0, 2) else 2.0) for ends in links if rank in ends))
        for rank, links in enumerate([[(0, 1), (1, 2), (0, 2)]] * 3 + [[(3, 4), (4, 5), (3, 5)]] * 3)
    ]
    times, records = Timings(1, mesh, received_timings(mesh, *timings)).communication()
    assert {(each.ranks, each.axis, each.milliseconds) for each in times} == {
        *(((one, other), "pipeline", 2.0) for one, other in ((0, 1), (1, 2), (3, 4), (4, 5), (3, 5))),
        ((0, 2), "pipeline", 9.0),
    }
    assert {(each.peers, each.verdict.evidence) for each in records} == {
        ((0, 3), (9.0, 2.0)),
        ((1, 4), (2.0, 2.0)),
        ((2, 5), (9.0, 2.0)),
    }


def test_a_group_is_named_by_its_axis():
    mesh = Mesh.grid(replica=2, shard=2, tensor=2)
    assert axis_of(mesh, (0, 1)) == "tensor"
    assert axis_of(mesh, (2, 0)) == "shard"
    assert axis_of(mesh, (1, 5)) == "replica"
    assert axis_of(mesh, (0, 1, 2, 3)) == "shard+tensor"


def test_the_size_of_the_message_does_not_grow_with_the_group():
    mesh = Mesh.grid(shard=512)
    lap = Lap("time/all_gather", tuple(range(512)), 100, (1.0,))
    assert sum(map(len, encode([module(1.0, lap)], mesh))) < 200


ORDINARY = StragglerConfig()


def observed(
    mesh: Mesh, rounds: Sequence[Sequence[Measured]], config: StragglerConfig = ORDINARY
) -> list[tuple[str, tuple[int, ...], int]]:
    stragglers = Stragglers(mesh, 0, config, BaselineConfig(warmup=3))
    return [
        (incident.scope.value, incident.ranks, incident.step)
        for step, measured in enumerate(rounds, 1)
        for incident in stragglers.observe(
            Timings(step, mesh, received_timings(mesh, *measured), config)
        ).incidents
    ]


QUIET = pairs(*[(1.0, 1.0)] * 6)


def doubted(stragglers: Stragglers, step: int, measured: Sequence[Measured]) -> set[str | None]:
    return stragglers.layers_to_time_again(Timings(step, GRID, received_timings(GRID, *measured)))


def test_a_straggler_is_timed_again_before_it_is_reported():
    stragglers = Stragglers(GRID, 0, StragglerConfig(), BaselineConfig(warmup=3))
    slow = list(QUIET)
    slow[2] = module(251.0, *QUIET[2].laps)
    (layer,) = {each.layer for each in QUIET}
    for step in range(1, 4):
        assert doubted(stragglers, step, QUIET) == set()
        stragglers.observe(Timings(step, GRID, received_timings(GRID, *QUIET)))
    assert doubted(stragglers, 4, slow) == set(), "slow once, which is not reported"
    assert stragglers.observe(Timings(4, GRID, received_timings(GRID, *slow))).incidents == []
    assert doubted(stragglers, 5, slow) == {layer}
    (incident,) = stragglers.observe(Timings(5, GRID, received_timings(GRID, *slow))).incidents
    assert incident.ranks == (2,)
    assert doubted(stragglers, 6, slow) == set(), "reported: there is nothing to find out"


def test_a_rank_that_is_fast_when_it_is_timed_again_is_not_reported():
    stragglers = Stragglers(GRID, 0, StragglerConfig(), BaselineConfig(warmup=3))
    slow = list(QUIET)
    slow[2] = module(251.0, *QUIET[2].laps)
    for step, measured in enumerate([QUIET, QUIET, slow, slow, slow, slow], 1):
        is_doubted = bool(doubted(stragglers, step, measured))
        times = received_timings(GRID, *(QUIET if is_doubted else measured))
        assert stragglers.observe(Timings(step, GRID, times)).incidents == []
        assert is_doubted == (step in (4, 6))


def test_a_shared_slowdown_is_timed_again_before_it_is_reported():
    stragglers = Stragglers(GRID, 0, StragglerConfig(), BaselineConfig(warmup=3))
    slow = [module(20.0, *each.laps) for each in QUIET]
    assert doubted(stragglers, 1, slow) == set(), "nothing is usual yet"
    for step, measured in enumerate([QUIET] * 4 + [slow] * 2, 1):
        assert doubted(stragglers, step, measured) == set()
        stragglers.observe(Timings(step, GRID, received_timings(GRID, *measured)))
    assert doubted(stragglers, 7, slow) == {each.layer for each in QUIET}


def test_records_are_those_this_rank_takes_part_in():
    stragglers = Stragglers(GRID, 3, StragglerConfig(), BaselineConfig())
    found = stragglers.observe(Timings(1, GRID, received_timings(GRID, *QUIET)))
    assert {each.peers for each in found.records} == {(1, 3, 5)}
    assert {each.surface for each in found.records} == {"time/module", "time/all_reduce@tensor"}


def test_two_replicas_of_shards_are_compared_together_and_their_updates_are_not():
    mesh = Mesh.grid(replica=2, shard=2)
    both = Measured("layer.0", (1,), {"time/module": 1.0, "time/optimizer": 1.0}, ())
    found = Timings(1, mesh, received_timings(mesh, *[both] * 4)).computation
    assert {(each.surface, each.peers) for each in found} == {
        ("time/module", (0, 1, 2, 3)),
        ("time/optimizer", (0, 2)),
        ("time/optimizer", (1, 3)),
    }


@pytest.mark.parametrize(
    ("degrees", "peers"),
    [
        ({"replica": 2, "shard": 2}, (0, 1, 2, 3)),
        ({"replica": 3, "shard": 2}, (0, 2, 4)),
        ({"replica": 2}, (0, 1)),
        ({"shard": 4}, (0, 1, 2, 3)),
        ({"replica": 2, "shard": 2, "tensor": 2}, (0, 2, 4, 6)),
    ],
)
def test_who_computes_the_same_layer(degrees: dict[str, int], peers: tuple[int, ...]):
    assert Mesh.grid(**degrees).layer_peers_of(0).ranks == peers


@pytest.mark.parametrize(("ratio", "found"), [(1.03, [("peer_group", (0, 1), 2)]), (1.1, [])])
def test_a_pair_is_compared_by_the_ratio_that_was_asked_for(ratio: float, found: list[object]):
    """Six percent and six milliseconds."""
    rounds = [[module(100.0), module(106.0)]] * 6
    assert observed(Mesh.grid(replica=2), rounds, StragglerConfig(min_slowdown_ratio=ratio)) == found


@pytest.mark.parametrize(("kappa", "status"), [(2.0, Status.ATTRIBUTED), (5.0, Status.AGREE)])
def test_peers_are_compared_by_the_kappa_that_was_asked_for(kappa: float, status: Status):
    mesh = Mesh.grid(replica=5)
    timings = received_timings(mesh, *map(module, (100.0, 101.0, 102.0, 103.0, 107.0)))
    (record,) = Timings(1, mesh, timings, StragglerConfig(kappa=kappa)).computation
    assert record.verdict is not None
    assert record.verdict.status is status
