import math
from dataclasses import replace

import numpy as np
import pytest

from torchscout.config import BaselineConfig
from torchscout.decision.consensus.rules import statistical
from torchscout.decision.records.record import Action, EvidenceRecord, Manifestation, Scope
from torchscout.decision.straggler.diagnosis import Baseline

QUIET = [50.0, 50.4, 50.2, 49.7]


def timed(times, *, surface="time/module", step=0, **context):
    return EvidenceRecord(
        step=step,
        surface=surface,
        manifestation=Manifestation.STRAGGLER,
        peers=tuple(range(len(times))),
        verdict=statistical([float(time) for time in times]),
        **context,
    )


def slower(factor):
    return [factor * time for time in QUIET]


def alarms(baseline, rounds, **context):
    """The rounds that were reported, counted from 1."""
    return [
        number
        for number, times in enumerate(rounds, 1)
        if baseline.observe([timed(times, step=number, **context)])
    ]


def learned(**config):
    baseline = Baseline(BaselineConfig(**config))
    assert alarms(baseline, [QUIET] * 20) == []
    return baseline


def test_a_shared_slowdown_is_the_jobs_and_blames_nobody():
    baseline = learned()
    records = [timed(slower(1.5), step=step) for step in (100, 120, 140)]
    assert baseline.observe(records[:1]) == []
    assert baseline.observe(records[1:2]) == []
    (incident,) = baseline.observe(records[2:])
    assert (incident.manifestation, incident.scope) == (Manifestation.STRAGGLER, Scope.JOB)
    assert (incident.ranks, incident.hosts, incident.step) == ((), (), 140)
    assert (incident.action, incident.records) == (Action.INSPECT, (records[2], records[1], records[0]))
    assert incident.sentence == (
        "All 4 peers have become slower together: time/module takes 75.2 ms at step 140, usually 50.1 ms; "
        "no rank stands out, so none is named."
    )


@pytest.mark.parametrize(("peers", "sigma"), [(3, 0.1), (8, 0.1), (3, 0.3)])
def test_ordinary_noise_is_silent(peers, sigma):
    rounds = 50 * np.random.default_rng(peers).lognormal(0, sigma, (5000, peers))
    assert alarms(Baseline(BaselineConfig()), rounds) == []


def test_too_little_history_reports_nothing():
    rounds = [QUIET] * 4 + [slower(3)] * 20
    assert alarms(Baseline(BaselineConfig(warmup=9)), rounds) == []
    assert alarms(Baseline(BaselineConfig(warmup=4)), rounds) == [7]


def test_times_on_which_peers_disagree_are_ignored():
    pair = Baseline(BaselineConfig())
    assert alarms(pair, [[50, 51]] * 20 + [[150, 300], [math.nan, 150]] * 10) == []
    assert alarms(pair, [[150, 151]] * 3) == [3]
    baseline = learned()
    assert alarms(baseline, [[150, 150, math.nan, math.nan]] * 10) == []
    unchecked = replace(timed(QUIET), verdict=None, reason="not due")
    assert [baseline.observe([unchecked]) for _ in range(10)] == [[]] * 10


def test_one_slow_rank_is_not_a_shared_slowdown():
    assert alarms(learned(), [[50.0, 50.4, 100.0, 49.7]] * 10) == []


def test_a_slowdown_is_reported_once_and_again_only_after_a_normal_round():
    assert alarms(learned(), [slower(1.5)] * 300 + [QUIET] + [slower(1.5)] * 5) == [3, 304]


def test_slow_rounds_do_not_enter_the_baseline():
    baseline = learned(history=16)
    alarms(baseline, [slower(1.5)] * 100 + [QUIET])
    assert alarms(baseline, [slower(1.3)] * 3) == [3]


def test_a_round_between_normal_and_slow_neither_confirms_nor_clears():
    assert alarms(learned(), [slower(1.5), slower(1.15), slower(1.5), slower(1.15), slower(1.5)]) == [5]
    assert alarms(learned(), [slower(1.5)] * 3 + [slower(1.15), slower(1.5)] * 10) == [3]


def test_a_gradual_slowdown_is_reported():
    drift = [slower(1 + step / 1000) for step in range(400)]
    (reported,) = alarms(learned(), drift)
    assert 200 < reported < 220


def test_a_job_that_becomes_faster_is_measured_by_its_new_pace():
    baseline = learned()
    assert alarms(baseline, [slower(0.5)] * 100 + [QUIET] * 5) == [103]


@pytest.mark.parametrize("factor", [1.19, 0.5])
def test_an_immaterial_slowdown_is_silent(factor):
    assert alarms(learned(), [slower(factor)] * 10) == []


def test_a_short_interval_must_be_a_millisecond_slower():
    times = [2.0, 2.01, 1.99]
    assert alarms(Baseline(BaselineConfig()), [times] * 20 + [[2.9, 2.91, 2.89]] * 10) == []
    assert alarms(Baseline(BaselineConfig()), [times] * 20 + [[3.9, 3.91, 3.89]] * 10) == [23]


def test_other_work_has_a_history_of_its_own():
    for other in ({"shape": (8, 4096)}, {"surface": "time/optimizer"}, {"mode": "backward"}):
        assert alarms(learned(), [slower(2)] * 20, **other) == []
    peers = [replace(timed(slower(2)), peers=(4, 5, 6, 7))] * 20
    baseline = learned()
    assert [baseline.observe([record]) for record in peers] == [[]] * 20


def test_sdc_records_are_ignored():
    baseline = learned()
    numbers = replace(timed(slower(3)), manifestation=Manifestation.SDC)
    assert [baseline.observe([numbers]) for _ in range(5)] == [[]] * 5


def test_surfaces_that_slow_down_together_are_one_incident():
    baseline = Baseline(BaselineConfig())
    for _ in range(20):
        baseline.observe([timed(QUIET), timed(QUIET, surface="time/all_gather")])
    both = [timed(slower(1.5)), timed(slower(4), surface="time/all_gather")]
    baseline.observe(both)
    baseline.observe(both)
    (incident,) = baseline.observe(both)
    assert incident.records[0].surface == "time/all_gather"
    assert len(incident.records) == 6
    assert "time/all_gather (and 1 more) takes" in incident.sentence


def test_several_layers_in_a_round_are_one_round():
    baseline = learned()
    assert [len(baseline.observe([timed(slower(1.5))] * 3)) for _ in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"kappa": 0.0},
        {"min_slowdown_ratio": 0.9},
        {"min_slowdown_ms": -1.0},
        {"confirmations": 0},
        {"warmup": 0},
        {"warmup": 65},
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        BaselineConfig(**wrong)
