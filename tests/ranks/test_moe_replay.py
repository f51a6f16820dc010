"""What the contracts of ``tests/contracts`` do not say of a mixture of experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.jobs.contracts import Attempt, Ranks
from evaluation.jobs.job import Report, Trial
from evaluation.jobs.mixture import SPREAD
from torchscout.decision.types import Scope
from torchscout.faults.plan import FaultPlan

EXPERTS = tuple(f"layer.{place}.mixture.experts" for place in (0, 1))


def reports_of(trial: Trial, folder: Path) -> list[Report]:
    with Ranks(Attempt("mixture", folder, folder)) as ranks:
        return ranks.train(trial).reports


@pytest.mark.long
def test_experts_are_compared_among_those_who_hold_the_same(tmp_path: Path):
    trial = Trial(steps=8, interval=1, run_dir=tmp_path / "run", keeps_records=True)
    peers: dict[str, set[tuple[int, ...]]] = {"experts": set(), "others": set()}
    for each in reports_of(trial, tmp_path):
        for record in each.numbers:
            if record.surface.startswith("layer."):
                peers["experts" if record.surface.startswith(EXPERTS) else "others"].add(record.peers)
    holders = {tuple(range(place, 6, SPREAD)) for place in range(SPREAD)}
    assert peers == {"experts": holders, "others": {tuple(range(6))}}


@pytest.mark.slow
def test_a_slow_expert_names_its_rank(tmp_path: Path):
    slow = FaultPlan()
    for place in EXPERTS:
        slow = slow.delay(rank=4, at=f"{place}/forward", step=range(3, 9), seconds=0.3, calls=range(1, 200))
    trial = Trial(
        steps=8, interval=1, run_dir=tmp_path / "run", replay={"recipes": ("experts",)}, faults=slow
    )
    incident = reports_of(trial, tmp_path)[0].incidents[0]
    assert (incident.scope, incident.ranks, incident.records[0].surface) == (Scope.RANK, (4,), "time/experts")


@pytest.mark.slow
def test_a_slow_exchange_names_its_group(tmp_path: Path):
    slow = FaultPlan().slow_collective(
        ranks=(2, 3), at="all_to_all@mesh_expert", axis="expert", step=range(6, 17), seconds=0.3
    )
    trial = Trial(
        steps=16, interval=1, run_dir=tmp_path / "run", replay={"recipes": ("all_to_all",)}, faults=slow
    )
    incident = reports_of(trial, tmp_path)[0].incidents[0]
    assert (incident.scope, incident.ranks) == (Scope.PROCESS_GROUP, (2, 3))
    assert incident.records[0].surface == "time/all_to_all@expert"
