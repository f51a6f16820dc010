"""Replay of context parallelism: attention that goes around ranks by hand, and PyTorch's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.context_jobs import WAYS, Trial, train
from tests.support.ranks import run_ranks
from tests.support.replay_results import UPDATES, faulty, layers_of, with_and_without
from tests.support.replayed_job import REPLAY, WIDTH
from torchscout.faults.plan import FaultPlan

LAYERS = layers_of("mix")
SLOW = pytest.mark.slow
OTHER_WAYS = [way for way in WAYS if way != "block"]


@pytest.mark.long_cases("2x2 block")
@pytest.mark.parametrize(
    "trial",
    [
        Trial((2, 2), "block"),
        *(pytest.param(Trial((2, 2), way), marks=SLOW) for way in OTHER_WAYS),
        pytest.param(Trial((2, 2), "gathered", sharded=True), marks=SLOW),
        pytest.param(Trial((2, 2), "block", own_buffer=True, steps=4), marks=SLOW),
        pytest.param(Trial((2, 2), "block", inside=True, steps=4), marks=SLOW),
        pytest.param(Trial((2, 2), "block", rotation="alltoall"), marks=SLOW),
        pytest.param(Trial((2, 2), "block", sharded=True), marks=SLOW),
        *(pytest.param(Trial((4, 2), way), marks=SLOW) for way in WAYS),
    ],
    ids=str,
)
def test_training_is_bitwise_the_same_and_everything_is_checked(trial: Trial, tmp_path: Path):
    state = {"state/owned"} if trial.sharded else {"state/parameters", "state/optimizer"}
    for same, found in run_ranks(with_and_without, trial.ranks, train, trial, tmp_path, timeout=300):
        assert same
        assert (found.failures, found.sentences, found.unchecked) == ([], [], set())
        assert found.agreed == LAYERS | UPDATES | state | {"process_groups/received"}
        assert found.certified == trial.steps


@pytest.mark.slow_cases("block", "gathered", "module")
@pytest.mark.parametrize("way", WAYS)
def test_the_source_computes_again_what_it_computed_in_training(way: str, tmp_path: Path):
    """Not its own tokens' attention to each other, which peers would agree about as well."""
    trial = Trial((2, 2), way, steps=3, rate=0.0)
    for rank, found in enumerate(run_ranks(train, 4, trial, tmp_path, timeout=120)):
        assert found.unchecked == set()
        again = [rank < 2] * 2  # the input of both replays was the first replica's
        assert found.echoes == {"output": again, "gradient": again}


FAULTS = [
    ("stack.1/output", REPLAY, "stack.1/output"),
    ("stack.1/grad_input", REPLAY, "stack.1/grad_input"),
    ("stack.1.down/weight.gradient", REPLAY, "stack.1.down/weight.grad"),
    ("stack.1.mix/weight", range(1), "stack.1.mix/weight"),
    ("stack.1.down/weight.exp_avg", range(1), "stack.1.down/weight.exp_avg"),
]
QUICK = [FAULTS[0], FAULTS[3]]
"""A wrong result and a wrong weight; the others are slow."""


@pytest.mark.slow_cases("stack.1/output-block")
@pytest.mark.parametrize("way", ["block", *(pytest.param(each, marks=SLOW) for each in OTHER_WAYS)])
@pytest.mark.parametrize(
    ("at", "calls", "surface"),
    [pytest.param(*each, id=each[2], marks=() if each in QUICK else SLOW) for each in FAULTS],
)
def test_a_wrong_number_names_the_rank(at: str, calls: range, surface: str, way: str, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=3, at=at, step=2, bit=20, calls=calls)
    found = faulty(train, Trial((3, 2), way, steps=3), faults, tmp_path)
    assert found[0].incidents[0] == ("rank", (3,), surface, 2), found[0].sentences
    assert {ranks for _, ranks, _, _ in found[0].incidents} == {(3,)}, found[0].sentences


@pytest.mark.slow_cases("block")
@pytest.mark.parametrize("way", ["block", pytest.param("gathered", marks=SLOW)])
def test_a_wrong_key_that_reaches_the_partner_is_one_incident_of_both(way: str, tmp_path: Path):
    key = WIDTH  # queries come first
    faults = FaultPlan().flip_bit(rank=2, at="stack.1.mix/output", step=2, bit=22, index=key, calls=REPLAY)
    found = faulty(train, Trial((3, 2), way, steps=3), faults, tmp_path)
    assert [each[:2] for each in found[0].incidents] == [("machine", (2, 3))], found[0].sentences
    assert "one of them may have received it from another" in found[0].sentences[0]


@pytest.mark.parametrize(
    ("at", "calls", "surface"),
    [pytest.param(*FAULTS[0], id="output"), pytest.param(*FAULTS[3], id="weight", marks=SLOW)],
)
def test_two_replicas_differ_as_a_group(at: str, calls: range, surface: str, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=3, at=at, step=2, bit=20, calls=calls)
    found = faulty(train, Trial((2, 2), "block", steps=2), faults, tmp_path)
    assert found[0].incidents[0] == ("peer_group", (1, 3), surface, 2), found[0].sentences
    statuses = {each.status for each in found[3].records if each.surface == surface and each.step == 2}
    assert statuses == {"inconclusive"}
