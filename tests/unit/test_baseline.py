"""A job that has become slower as a whole, measured by its own history."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from torchscout.config import BaselineConfig
from torchscout.decision.baseline import Baseline
from torchscout.decision.timings import PeerTimes, Work
from torchscout.decision.types import Scope

QUIET = [50.0, 50.4, 50.2, 49.7]
SHORT = [2.0, 2.01, 1.99]
MODULE = Work("time/module", "layer.0", (2, 8))


def timed(times: Sequence[float], step: int = 0, work: Work = MODULE) -> PeerTimes:
    return PeerTimes(step, work, np.arange(len(times))[np.newaxis], np.array([times], np.float64))


def slower(factor: float) -> list[float]:
    return [factor * time for time in QUIET]


def alarms(baseline: Baseline, rounds: Sequence[Sequence[float]], work: Work = MODULE) -> list[int]:
    """The rounds that were reported, counted from 1."""
    return [
        number for number, times in enumerate(rounds, 1) if baseline.observe([timed(times, number, work)])
    ]


def learned(**config: int) -> Baseline:
    baseline = Baseline(BaselineConfig(**config))
    assert alarms(baseline, [QUIET] * 20) == []
    return baseline


def test_an_incident_of_the_job_blames_nobody_and_has_its_evidence():
    baseline, rounds = learned(), [timed(slower(1.5), step) for step in (100, 120, 140)]
    found = [baseline.observe([each]) for each in rounds]
    assert found[:2] == [[], []]
    (incident,) = found[2]
    assert (incident.scope, incident.ranks, incident.hosts, incident.step) == (Scope.JOB, (), (), 140)
    assert incident.records == tuple(each.record(0) for each in reversed(rounds))
    assert all(fact in incident.sentence for fact in ("74.6 ms", "49.7 ms", "step 140"))


@pytest.mark.parametrize(("peers", "sigma"), [(3, 0.1), (8, 0.1), (3, 0.3)])
def test_ordinary_noise_is_silent(peers: int, sigma: float):
    rounds = 50 * np.random.default_rng(peers).lognormal(0, sigma, (3000, peers))
    assert alarms(Baseline(BaselineConfig()), rounds.tolist()) == []


@pytest.mark.parametrize(
    ("rounds", "reported"),
    [
        pytest.param([slower(1.5)] * 300 + [QUIET] + [slower(1.5)] * 5, [3, 304], id="again after one"),
        pytest.param([slower(1.5), slower(1.15)] * 2 + [slower(1.5)], [5], id="between normal and slow"),
        pytest.param([slower(1.5)] * 3 + [slower(1.15), slower(1.5)] * 10, [3], id="still reported"),
        pytest.param([slower(0.5)] * 100 + [QUIET] * 5, [103], id="the new pace counts"),
        pytest.param([slower(1 + step / 1000) for step in range(400)], [204], id="gradually"),
        pytest.param([slower(1.19)] * 10, [], id="immaterial"),
        pytest.param([[50.0, 50.4, 100.0, 49.7]] * 10, [], id="one slow rank"),
        pytest.param([[50.0, 100.8, 100.4, 99.4]] * 10, [], id="one rank is not slow"),
        pytest.param([[np.nan, np.nan, np.nan, 150]] * 10, [], id="nobody to compare with"),
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
    "other", [MODULE._replace(shape=(8, 4096)), MODULE._replace(surface="time/optimizer")]
)
def test_other_work_has_a_history_of_its_own(other: Work):
    assert alarms(learned(), [slower(2)] * 7, other) == []


def test_the_work_of_another_layer_is_equal():
    assert alarms(learned(), [slower(2)] * 3, MODULE._replace(layer="layer.1")) == [3]


def test_surfaces_that_slow_down_together_are_one_incident():
    baseline, other = Baseline(BaselineConfig()), MODULE._replace(surface="time/all_gather")

    def reported(factor: float) -> int:
        return len(baseline.observe([timed(slower(factor)), timed(slower(factor), work=other)]))

    assert [reported(1.0) for _ in range(20)] == [0] * 20
    assert [reported(1.5) for _ in range(3)] == [0, 0, 1]


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
