"""Replay of tensor parallelism, with and without sequence parallelism, under replicas, FSDP2 and HSDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.ranks import run_ranks
from tests.support.replay_results import UPDATES, faulty, layers_of, with_and_without
from tests.support.replayed_job import REPLAY
from tests.support.tensor_jobs import Trial, train
from torchscout.faults.plan import FaultPlan

LAYERS = layers_of("up")
COPIES = {"state/parameters", "state/optimizer"}
SLOW = pytest.mark.slow


@pytest.mark.long_cases("2x2 distributed")
@pytest.mark.parametrize(
    "trial",
    [
        Trial((2, 2), "distributed"),
        pytest.param(Trial((2, 2), "plain"), marks=SLOW),
        pytest.param(Trial((2, 2), "sequence"), marks=SLOW),
        pytest.param(Trial((2, 2), "distributed", sharded=True), marks=SLOW),
        pytest.param(Trial((2, 2), "plain", sharded=True), marks=SLOW),
        pytest.param(Trial((2, 2), "sequence", sharded=True), marks=SLOW),
        pytest.param(Trial((2, 2, 2), "distributed", sharded=True), marks=SLOW),
        pytest.param(Trial((2, 2, 2), "plain", sharded=True), marks=SLOW),
        pytest.param(Trial((2, 2, 2), "sequence", sharded=True), marks=SLOW),
        *(pytest.param(Trial((4, 2), style), marks=SLOW) for style in ("plain", "sequence", "distributed")),
        pytest.param(Trial((2, 4), "distributed"), marks=SLOW),
        *(
            pytest.param(Trial((4, 2), style, sharded=True), marks=SLOW)
            for style in ("plain", "sequence", "distributed")
        ),
    ],
    ids=str,
)
def test_training_is_bitwise_the_same_and_everything_is_checked(trial: Trial, tmp_path: Path):
    has_copies = not trial.sharded or len(trial.shape) == 3
    state = COPIES if has_copies else {"state/owned"}
    for same, found in run_ranks(with_and_without, trial.ranks, train, trial, tmp_path, timeout=300):
        assert same
        assert (found.failures, found.sentences, found.unchecked) == ([], [], set())
        assert found.agreed == LAYERS | UPDATES | state | {"process_groups/received"}
        assert found.certified == trial.steps
        assert found.between == ((DTensor,) if trial.style == "distributed" else (torch.Tensor,))


@pytest.mark.long_cases("distributed")
@pytest.mark.parametrize(
    "style", ["distributed", *(pytest.param(each, marks=SLOW) for each in ("plain", "sequence"))]
)
def test_the_source_computes_again_what_it_computed_in_training(style: str, tmp_path: Path):
    trial = Trial((2, 2), style, steps=3, rate=0.0)
    for rank, found in enumerate(run_ranks(train, 4, trial, tmp_path, timeout=120)):
        assert found.unchecked == set()
        again = [rank < 2] * 2  # the input of both replays was the first replica's
        assert found.echoes == {"output": again, "gradient": again}


FAULTS = [
    ("stack.1/output", REPLAY, "stack.1/output"),
    pytest.param("stack.1/grad_input", REPLAY, "stack.1/grad_input", marks=SLOW),
    pytest.param("stack.1.up/weight.gradient", REPLAY, "stack.1.up/weight.grad", marks=SLOW),
    ("stack.1.up/weight", range(1), "stack.1.up/weight"),
    pytest.param("stack.1.down/weight.exp_avg", range(1), "stack.1.down/weight.exp_avg", marks=SLOW),
    pytest.param("stack.1.norm/weight.gradient", REPLAY, "stack.1.norm/weight.grad", marks=SLOW),
]


@pytest.mark.slow_cases("stack.1/output-calls0-stack.1/output-distributed")
@pytest.mark.long_cases("stack.1.up/weight-calls3-stack.1.up/weight-distributed")
@pytest.mark.parametrize(
    "style", ["distributed", *(pytest.param(each, marks=SLOW) for each in ("plain", "sequence"))]
)
@pytest.mark.parametrize(("at", "calls", "surface"), FAULTS)
def test_a_wrong_number_names_the_rank(at: str, calls: range, surface: str, style: str, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=3, at=at, step=2, bit=20, calls=calls)
    found = faulty(train, Trial((3, 2), style, steps=3), faults, tmp_path)
    assert found[0].incidents[0] == ("rank", (3,), surface, 2), found[0].sentences
    assert {ranks for _, ranks, _, _ in found[0].incidents} == {(3,)}, found[0].sentences


@pytest.mark.slow_cases("distributed")
@pytest.mark.parametrize("style", ["distributed", pytest.param("plain", marks=SLOW)])
def test_a_wrong_part_that_partners_add_up_is_one_incident_of_all_of_them(style: str, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=3, at="stack.1.up/output", step=2, bit=30, calls=REPLAY)
    found = faulty(train, Trial((3, 2), style, steps=3), faults, tmp_path)
    assert [each[:2] for each in found[0].incidents] == [("machine", (2, 3))], found[0].sentences
    assert "one of them may have received it from another" in found[0].sentences[0]


@pytest.mark.long_cases("output")
@pytest.mark.parametrize(
    ("at", "calls", "surface"),
    [pytest.param(*FAULTS[0], id="output"), pytest.param(*FAULTS[3], id="weight", marks=SLOW)],
)
def test_two_replicas_differ_as_a_group(at: str, calls: range, surface: str, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=3, at=at, step=2, bit=20, calls=calls)
    found = faulty(train, Trial((2, 2), "distributed", steps=2), faults, tmp_path)
    assert found[0].incidents[0] == ("peer_group", (1, 3), surface, 2), found[0].sentences
    assert {each.status for each in found[3].records if each.surface == surface and each.step == 2} == {
        "inconclusive"
    }


@pytest.mark.parametrize(
    ("shape", "at", "calls", "surface", "step", "rank"),
    [
        pytest.param((3, 2), "stack.1/output", REPLAY, "stack.1/output", 2, 3, marks=SLOW),
        # The owner's real update, when its turn has come; the source of that round is its owner.
        pytest.param((3, 2), "stack.0.up/weight", range(1), "optimizer/update", 4, 1, marks=SLOW),
    ],
    ids=["output", "update"],
)
def test_a_wrong_number_under_fsdp_names_the_rank(
    shape: tuple[int, ...], at: str, calls: range, surface: str, step: int, rank: int, tmp_path: Path
):
    faults = FaultPlan().flip_bit(rank=rank, at=at, step=step, bit=20, calls=calls)
    found = faulty(train, Trial(shape, "distributed", sharded=True, steps=step), faults, tmp_path)
    assert found[0].incidents == [("rank", (rank,), surface, step)], found[0].sentences
