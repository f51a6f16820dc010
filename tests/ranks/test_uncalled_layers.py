"""Layers that training stops calling, as with CUDA graphs: replayed in the form of their first call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.graphed_jobs import STEPS, WARM, Trial, train
from tests.support.ranks import RankError, run_ranks
from tests.support.replay_jobs import differing
from torchscout.decision.records.record import Manifestation, Scope
from torchscout.faults.plan import FaultPlan

LAYERS = ("tokens", "stack.0", "stack.1", "head")


def flipped(rank: int, at: str, step: int) -> FaultPlan:
    return FaultPlan().flip_bit(rank=rank, at=at, step=step, bit=20, index=3, calls=None)


def test_a_clean_job_is_certified_and_trains_bitwise_the_same(tmp_path: Path):
    alone = run_ranks(train, 3, Trial(), timeout=90)
    for plain, found in zip(alone, run_ranks(train, 3, Trial(tmp_path), timeout=90), strict=True):
        assert found.bits == plain.bits
        assert (found.incidents, found.failures, found.unchecked) == ([], [], {})
        assert found.replay["certified"] == STEPS
        late = {each.surface for each in found.numbers if each.step > WARM and each.status == "agree"}
        assert {f"{layer}/output" for layer in LAYERS} <= late
        assert {"stack.0/grad_input", "stack.1.up/weight.grad", "tokens/weight.grad"} <= late


@pytest.mark.parametrize("at", ["stack.1/output", "stack.1/grad_input", "tokens/output"])
def test_a_wrong_number_names_its_rank(at: str, tmp_path: Path):
    step = 6 if at.startswith("stack") else 5
    for found in run_ranks(train, 3, Trial(tmp_path, faults=flipped(2, at, step)), timeout=90):
        assert found.failures == []
        (incident,) = found.incidents
        assert (incident.manifestation, incident.scope) == (Manifestation.SDC, Scope.RANK)
        assert (incident.ranks, incident.step) == ((2,), step), incident.sentence
        assert {surface.partition("/")[0] for surface in differing(found.numbers)} == {at.partition("/")[0]}
        assert found.replay["certified"] == step - 1


def test_of_two_ranks_nobody_is_named(tmp_path: Path):
    for found in run_ranks(train, 2, Trial(tmp_path, faults=flipped(1, "stack.1/output", 6)), timeout=90):
        (incident,) = found.incidents
        assert (incident.scope, incident.ranks) == (Scope.PEER_GROUP, (0, 1))


@pytest.mark.slow
def test_a_slow_layer_names_its_rank(tmp_path: Path):
    faults = FaultPlan()
    for layer in LAYERS[1:3]:
        faults = faults.delay(
            rank=1, at=f"{layer}/forward", step=range(WARM + 1, STEPS + 1), seconds=0.3, calls=None
        )
    for found in run_ranks(train, 3, Trial(tmp_path, faults=faults), timeout=120):
        assert {(each.manifestation, each.ranks) for each in found.incidents} == {
            (Manifestation.STRAGGLER, (1,))
        }


def test_a_killed_job_resumes_bitwise(tmp_path: Path):
    plan = Trial(tmp_path / "run", directory=tmp_path / "kept")
    alone = run_ranks(train, 3, Trial(), timeout=90)
    with pytest.raises(RankError):
        run_ranks(train, 3, Trial(tmp_path / "run", directory=tmp_path / "kept", killed=6), timeout=90)
    for plain, found in zip(alone, run_ranks(train, 3, plan, timeout=90), strict=True):
        assert 0 < found.resumed < 6
        assert found.bits == plain.bits


def test_layers_that_were_never_called_are_left_out_with_the_reason(tmp_path: Path):
    """As if graphs were captured before torchscout is attached."""
    for found in run_ranks(train, 3, Trial(tmp_path, warm=0), timeout=90):
        assert (found.incidents, found.failures) == ([], [])
        said = str(found.unchecked["stack.0/layer"])
        assert "a CUDA graph must be captured after torchscout is attached" in said
        assert "state/parameters" in found.agreed
        assert found.replay["certified"] == STEPS
