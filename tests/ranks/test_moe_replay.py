"""Replay of a mixture of experts: router, AllToAll and experts among those who do the same work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.mixture_jobs import Trial, train
from tests.support.ranks import run_ranks
from tests.support.replay_results import with_and_without
from torchscout.config import ReplayConfig
from torchscout.decision.records.record import Scope
from torchscout.faults.plan import FaultPlan

REPLAYED = range(1, 200)
LAYERS = (0, 1)
DENSE = {
    f"layer.{place}.{part}/{what}"
    for place in LAYERS
    for part in ("norm", "mixer", "mixture_norm", "mixture.router")
    for what in ("input", "parameters", "output", "grad_input")
}
EXPERT = {
    f"layer.{place}.mixture.experts/{what}"
    for place in LAYERS
    for what in ("input", "parameters", "output", "grad_input", "up.grad", "down.grad")
}
TRAFFIC = {
    f"all_to_all/{plan}.{what}"
    for plan in ("captured", "balanced", "shifted", "reversed", "skewed", "sparse")
    for what in ("sent", "received")
}
EVERYTHING = Trial(4, 2, uneven=1.0, steps=10)
SIX = Trial(6, 2, steps=4)


@pytest.mark.long_cases("4 ranks, 2 share the experts")
@pytest.mark.parametrize(
    "trial",
    [
        EVERYTHING,
        pytest.param(replace(EVERYTHING, ranks=8, spread=2), marks=pytest.mark.slow),
        pytest.param(replace(EVERYTHING, ranks=16, spread=4), marks=pytest.mark.slow),
    ],
    ids=lambda each: f"{each.ranks} ranks, {each.spread} share the experts",
)
def test_uneven_routing_is_no_fault_and_training_is_bitwise_the_same(trial: Trial, tmp_path: Path):
    everybody = run_ranks(with_and_without, trial.ranks, train, trial, tmp_path, timeout=600)
    for same, result in everybody:
        assert same
        assert ([each.sentence for each in result.incidents], result.failures) == ([], [])
        assert result.agreed >= DENSE | EXPERT | TRAFFIC | {"state/parameters", "state/optimizer"}
        assert not {surface for surface in result.unchecked if "experts" not in surface}
    rows = [sum(counts) for _, result in everybody for counts in result.routed]
    assert max(rows) > 10 * min(rows), "some experts are much more popular than others"
    peers = {each.peers for _, result in everybody for each in result.records if each.surface in EXPERT}
    assert peers == {group.ranks for group in trial.mesh.peer_groups("expert")}
    dense = {each.peers for _, result in everybody for each in result.records if each.surface in DENSE}
    assert dense == {tuple(range(trial.ranks))}


@pytest.mark.slow_cases("AllToAll", "expert optimizer", "expert", "router")
@pytest.mark.long_cases("expert weight")
@pytest.mark.parametrize(
    ("faults", "surface", "peers"),
    [
        (
            FaultPlan().flip_bit(rank=3, at="layer.1.mixture.experts/output", step=2, bit=20, calls=REPLAYED),
            "layer.1.mixture.experts/output",
            (1, 3, 5),
        ),
        (
            FaultPlan().flip_bit(rank=2, at="layer.0.mixture.experts/down", step=2, bit=3),
            "layer.0.mixture.experts/down",
            (0, 2, 4),
        ),
        (
            FaultPlan().flip_bit(rank=4, at="layer.0.mixture.experts/up.exp_avg_sq", step=3, bit=12),
            "layer.0.mixture.experts/up.exp_avg_sq",
            (0, 2, 4),
        ),
        (
            FaultPlan().flip_bit(rank=5, at="layer.0.mixture.router/output", step=4, bit=20, calls=REPLAYED),
            "layer.0.mixture.router/output",
            (0, 1, 2, 3, 4, 5),
        ),
        (
            FaultPlan().flip_bit(rank=1, at="all_to_all@mesh_expert", step=2, bit=9, calls=range(10, 400)),
            "all_to_all/balanced.received",
            (1, 3, 5),
        ),
    ],
    ids=["expert", "expert weight", "expert optimizer", "router", "AllToAll"],
)
def test_wrong_numbers_name_their_rank(
    faults: FaultPlan, surface: str, peers: tuple[int, ...], tmp_path: Path
):
    (planned,) = faults
    everybody = run_ranks(train, 6, replace(SIX, faults=faults), tmp_path, timeout=120)
    assert [result.fired > 0 for result in everybody] == [rank == planned.rank for rank in range(6)]
    incident = everybody[0].incidents[0]
    assert (incident.scope, incident.ranks) == (Scope.RANK, (planned.rank,))
    assert (incident.records[0].surface, incident.records[0].peers) == (surface, peers)
    assert incident.step == planned.steps[0]
    for result in everybody:
        assert {each.ranks for each in result.incidents} == {(planned.rank,)}
        assert result.failures == []


def test_wrong_numbers_of_two_expert_replicas_name_the_group(tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=3, at="layer.1.mixture.experts/output", step=2, bit=20, calls=REPLAYED)
    everybody = run_ranks(train, 4, Trial(4, 2, steps=3, faults=faults), tmp_path, timeout=120)
    assert [result.fired > 0 for result in everybody] == [False, False, False, True]
    (incident,) = everybody[0].incidents
    assert (incident.scope, incident.ranks) == (Scope.PEER_GROUP, (1, 3))


@pytest.mark.slow
def test_a_slow_expert_names_its_rank_and_a_slow_exchange_its_group(tmp_path: Path):
    quick = ReplayConfig(interval=1, recipes=("experts",))
    slow = FaultPlan()
    for place in LAYERS:
        at = f"layer.{place}.mixture.experts/forward"
        slow = slow.delay(rank=4, at=at, step=range(3, 9), seconds=0.3, calls=REPLAYED)
    trial = replace(SIX, steps=8, faults=slow, replay=quick)
    everybody = run_ranks(train, 6, trial, tmp_path / "expert", timeout=120)
    incident = everybody[0].incidents[0]
    assert (incident.scope, incident.ranks, incident.records[0].surface) == (Scope.RANK, (4,), "time/experts")

    traffic = ReplayConfig(interval=1, recipes=("all_to_all",))
    late = FaultPlan().slow_collective(
        ranks=(2, 3), at="all_to_all@mesh_expert", axis="expert", step=range(6, 17), seconds=0.3
    )
    trial = replace(SIX, steps=16, faults=late, replay=traffic)
    everybody = run_ranks(train, 6, trial, tmp_path / "exchange", timeout=240)
    incident = everybody[0].incidents[0]
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (2, 3))
    assert incident.records[0].surface == "time/all_to_all@expert"
