"""CUDA graphs over NCCL: their layers are replayed all the same, and the graphs stay as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.compiled_jobs import Found, Way, with_and_without
from tests.support.graphed_jobs import LONG, STEPS, WARM, Trial, train
from tests.support.hangs import resolutions
from tests.support.nccl_ranks import WATCHED
from tests.support.ranks import RankError, run_ranks
from torchscout.faults.plan import FaultPlan

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3)]
LAYERS = ("tokens", "stack.0", "stack.1", "head")


def trained(trial: Trial, **more):
    return run_ranks(train, 3, trial, timeout=400, backend="nccl", **more)


@pytest.mark.parametrize("steps", [STEPS, pytest.param(LONG, marks=pytest.mark.slow)])
def test_a_healthy_job_is_silent_certified_and_bitwise_the_same(steps: int, tmp_path: Path):
    trial = Trial(steps=steps)
    for plain, found in zip(trained(trial), trained(replace(trial, run_dir=tmp_path)), strict=True):
        assert (found.incidents, found.failures, found.unchecked) == ([], [], {})
        assert found.bits == plain.bits
        assert found.replay["certified"] == steps
        late = {each.surface for each in found.numbers if each.step > WARM and each.status == "agree"}
        assert {f"{layer}/output" for layer in LAYERS} <= late
        assert {"stack.0/grad_input", "stack.1.up/weight.grad"} <= late


def test_a_job_that_is_captured_at_once_is_replayed_from_the_form_of_the_captured_call(tmp_path: Path):
    plain = trained(Trial(warm=0))
    for alone, found in zip(plain, trained(Trial(tmp_path, warm=0)), strict=True):
        assert (found.incidents, found.failures) == ([], [])
        assert found.bits == alone.bits
        assert {f"{layer}/output" for layer in LAYERS} <= found.agreed, found.unchecked


@pytest.mark.parametrize("at", ["stack.1/output", "stack.1/grad_input"])
def test_a_wrong_number_names_its_rank(at: str, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=2, at=at, step=6, bit=20, index=3, calls=None)
    found = trained(Trial(tmp_path, faults=faults))
    assert found[2].fired
    (incident,) = found[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (2,), 6)


def test_a_wrong_weight_names_its_rank_and_is_not_certified(tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=1, at="stack.0.up/weight", step=5, bit=0)
    found = trained(Trial(tmp_path, faults=faults))
    (incident,) = found[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 5)
    assert found[0].replay["certified"] == 4


def test_a_slow_layer_names_its_rank(tmp_path: Path):
    faults = FaultPlan()
    for layer in LAYERS[1:3]:
        faults = faults.delay(
            rank=1, at=f"{layer}/forward", step=range(WARM + 2, STEPS + 1), seconds=0.3, calls=None
        )
    found = trained(Trial(tmp_path, faults=faults))
    assert found[1].fired
    named = {(each.manifestation.value, each.ranks) for each in found[0].incidents}
    assert named == {("straggler", (1,))}, found[0].incidents


def test_a_rank_that_sleeps_before_its_update_is_named_and_training_goes_on(tmp_path: Path):
    faults = FaultPlan().stall(rank=1, at="step", step=6, seconds=10.0)
    found = trained(Trial(tmp_path, observer=WATCHED, faults=faults))
    (incident,) = found[0].incidents
    assert (incident.manifestation.value, incident.ranks) == ("hang", (1,)), incident.sentence
    (resolved,) = resolutions(tmp_path)
    assert resolved.ranks == (1,)


def test_a_killed_job_resumes_bitwise(alone: dict[str, str], tmp_path: Path):
    plan = Trial(tmp_path / "run", directory=tmp_path / "kept")
    with pytest.raises(RankError):
        trained(replace(plan, killed=6), environment=alone)
    resumed = trained(plan, environment=alone)
    for plain, found in zip(trained(Trial()), resumed, strict=True):
        assert 0 < found.resumed < 6
        assert (found.failures, found.incidents) == ([], [])
        assert found.bits == plain.bits


def test_an_optimizer_inside_of_the_graph_is_left_alone(tmp_path: Path):
    plain = trained(Trial(whole_step=True))
    for alone, found in zip(plain, trained(Trial(tmp_path, whole_step=True)), strict=True):
        assert (found.failures, found.incidents) == ([], [])
        assert found.bits == alone.bits
        assert found.status["step"] == 0


def test_a_model_that_was_graphed_as_a_whole_before_is_checked_without_its_layers(tmp_path: Path):
    plain = trained(Trial(callables=True))
    for alone, found in zip(plain, trained(Trial(tmp_path, callables=True)), strict=True):
        assert (found.failures, found.incidents) == ([], [])
        assert found.bits == alone.bits
        assert "state/parameters" in found.agreed
        assert "must be captured after torchscout is attached" in str(found.unchecked["stack.0/layer"])
        assert found.replay["certified"] == STEPS


def repeatable(rank: int, way: Way, run_dir: Path, backend: str) -> tuple[Found, int, list[bytes]]:
    """Compiled code adds gradients of embeddings in any order unless it must not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return with_and_without(rank, way, run_dir, backend)


def test_graphs_of_compiled_code_are_replayed_eagerly_and_training_is_bitwise_the_same(tmp_path: Path):
    way = Way(options={"mode": "reduce-overhead"})
    found = run_ranks(repeatable, 3, way, tmp_path, "inductor", timeout=400, backend="nccl")
    for result, _, weights in found:
        assert (result.incidents, result.failures) == ([], [])
        assert result.weights == weights
        agreeing = {each.surface for each in result.records if each.status == "agree"}
        assert {f"{layer}/output" for layer in LAYERS} <= agreeing, result.status["not_checked"]
