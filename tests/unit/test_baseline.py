"""A job that has become slower as a whole, measured by its own history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from torchscout.config import BaselineConfig
from torchscout.decision.consensus import statistical
from torchscout.decision.straggler.diagnosis import Baseline
from torchscout.decision.types import EvidenceRecord, Manifestation, Scope

QUIET = [50.0, 50.4, 50.2, 49.7]
SHORT = [2.0, 2.01, 1.99]


def timed(times: Sequence[float], *, step: int = 0, **changed: Any) -> EvidenceRecord:
    record = EvidenceRecord(
        step=step,
        surface="time/module",
        manifestation=Manifestation.STRAGGLER,
        peers=tuple(range(len(times))),
        verdict=statistical([float(time) for time in times]),
    )
    return replace(record, **changed)


def slower(factor: float) -> list[float]:
    return [factor * time for time in QUIET]


def alarms(baseline: Baseline, rounds: Sequence[Sequence[float]], **changed: Any) -> list[int]:
    """The rounds that were reported, counted from 1."""
    return [
        number
        for number, times in enumerate(rounds, 1)
        if baseline.observe([timed(times, step=number, **changed)])
    ]


def learned(**config: Any) -> Baseline:
    baseline = Baseline(BaselineConfig(**config))
    assert alarms(baseline, [QUIET] * 20) == []
    return baseline


def test_an_incident_of_the_job_blames_nobody_and_has_its_evidence():
    baseline, records = learned(), [timed(slower(1.5), step=step) for step in (100, 120, 140)]
    assert [*baseline.observe(records[:1]), *baseline.observe(records[1:2])] == []
    (incident,) = baseline.observe(records[2:])
    assert (incident.scope, incident.ranks, incident.hosts, incident.step) == (Scope.JOB, (), (), 140)
    assert incident.records == (records[2], records[1], records[0])
    assert all(fact in incident.sentence for fact in ("75.2 ms", "50.1 ms", "step 140"))


@pytest.mark.parametrize(("peers", "sigma"), [(3, 0.1), (8, 0.1), (3, 0.3)])
def test_ordinary_noise_is_silent(peers: int, sigma: float):
    rounds = 50 * np.random.default_rng(peers).lognormal(0, sigma, (5000, peers))
    assert alarms(Baseline(BaselineConfig()), rounds) == []


@pytest.mark.parametrize(
    ("rounds", "reported"),
    [
        pytest.param([slower(1.5)] * 300 + [QUIET] + [slower(1.5)] * 5, [3, 304], id="again after one"),
        pytest.param([slower(1.5), slower(1.15)] * 2 + [slower(1.5)], [5], id="between normal and slow"),
        pytest.param([slower(1.5)] * 3 + [slower(1.15), slower(1.5)] * 10, [3], id="still reported"),
        pytest.param([slower(0.5)] * 100 + [QUIET] * 5, [103], id="the new pace counts"),
        pytest.param([slower(1 + step / 1000) for step in range(400)], [203], id="gradually"),
        pytest.param([slower(1.19)] * 10, [], id="immaterial"),
        pytest.param([[50.0, 50.4, 100.0, 49.7]] * 10, [], id="one slow rank"),
        pytest.param([[150, 150, np.nan, np.nan]] * 10, [], id="half of the times are missing"),
    ],
)
def test_rounds_that_are_reported_after_a_quiet_time(rounds: list[list[float]], reported: list[int]):
    assert alarms(learned(), rounds) == reported


@pytest.mark.parametrize(
    ("config", "rounds", "reported"),
    [
        ({"warmup": 9}, [QUIET] * 4 + [slower(3)] * 20, []),
        ({"warmup": 4}, [QUIET] * 4 + [slower(3)] * 20, [7]),
        ({}, [SHORT] * 20 + [[2.9, 2.91, 2.89]] * 10, []),
        ({}, [SHORT] * 20 + [[3.9, 3.91, 3.89]] * 10, [23]),
        ({}, [[50, 51]] * 20 + [[150, 300], [np.nan, 150]] * 10 + [[150, 151]] * 3, [43]),
    ],
)
def test_rounds_that_are_reported_from_the_start(
    config: dict, rounds: list[list[float]], reported: list[int]
):
    assert alarms(Baseline(BaselineConfig(**config)), rounds) == reported


def test_slow_rounds_do_not_enter_the_history():
    baseline = learned(history=16)
    alarms(baseline, [slower(1.5)] * 100 + [QUIET])
    assert alarms(baseline, [slower(1.3)] * 3) == [3]


@pytest.mark.parametrize(
    "other",
    [
        {"shape": (8, 4096)},
        {"surface": "time/optimizer"},
        {"mode": "backward"},
        {"peers": (4, 5, 6, 7)},
        {"manifestation": Manifestation.SDC},
        {"verdict": None, "reason": "not due"},
    ],
    ids=str,
)
def test_other_work_has_a_history_of_its_own(other: dict):
    assert alarms(learned(), [slower(2)] * 20, **other) == []


def test_surfaces_that_slow_down_together_are_one_incident():
    baseline = Baseline(BaselineConfig())

    def observed(factor: float) -> list[Any]:
        return baseline.observe([timed(slower(factor)), timed(slower(factor), surface="time/all_gather")] * 2)

    assert [observed(1.0) for _ in range(20)] == [[]] * 20
    assert [len(observed(1.5)) for _ in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kappa", 0.0),
        ("min_slowdown_ratio", 0.9),
        ("min_slowdown_ms", -1.0),
        ("confirmations", 0),
        ("warmup", 65),
    ],
)
def test_a_wrong_setting_is_refused(name: str, value: float):
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        BaselineConfig(**{name: value})
