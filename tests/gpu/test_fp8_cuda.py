"""Layers in float8 by ``torch._scaled_mm``, with delayed scaling, eagerly and as CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.fp8_layers import Float8Net
from tests.support.graphed_jobs import LONG, STEPS, WARM, Trial, train
from tests.support.nccl_ranks import WATCHED
from tests.support.ranks import RankError, run_ranks
from torchscout.faults.plan import FaultPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nccl(3),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs float8"
    ),
]
EAGER, AS_GRAPH = Trial(build=Float8Net, warm=LONG), Trial(build=Float8Net)
either = pytest.mark.parametrize("trial", [EAGER, AS_GRAPH], ids=["eager", "graph"])


def trained(trial: Trial, **more):
    return run_ranks(train, 3, trial, timeout=400, backend="nccl", **more)


@pytest.mark.parametrize("steps", [STEPS, pytest.param(LONG, marks=pytest.mark.slow)])
@either
def test_a_healthy_job_is_silent_certified_and_bitwise_the_same(trial: Trial, steps: int, tmp_path: Path):
    trial = replace(trial, steps=steps)
    for plain, found in zip(trained(trial), trained(replace(trial, run_dir=tmp_path)), strict=True):
        assert (found.incidents, found.failures, found.unchecked) == ([], [], {})
        assert found.bits == plain.bits
        assert {"stack.0/output", "stack.1/output", "stack.1.down/weight.grad"} <= found.agreed
        assert found.replay["certified"] == steps


@either
def test_a_wrong_number_names_its_rank(trial: Trial, tmp_path: Path):
    # A graph calls no hook, so that every call in its step is a replay.
    calls = range(1, 200) if trial is EAGER else None
    faults = FaultPlan().flip_bit(rank=2, at="stack.1.up/output", step=4, bit=20, calls=calls)
    found = trained(replace(trial, run_dir=tmp_path, faults=faults))
    (incident,) = found[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (2,), 4)


@either
def test_a_slow_layer_names_its_rank(trial: Trial, tmp_path: Path):
    faults = FaultPlan()
    for layer in ("stack.0", "stack.1"):
        faults = faults.delay(
            rank=1, at=f"{layer}/forward", step=range(WARM + 2, STEPS + 1), seconds=0.3, calls=None
        )
    found = trained(replace(trial, run_dir=tmp_path, faults=faults))
    named = {(each.manifestation.value, each.ranks) for each in found[0].incidents}
    assert named == {("straggler", (1,))}, found[0].incidents


@either
def test_a_rank_that_sleeps_is_named(trial: Trial, tmp_path: Path):
    at = "stack.0/forward" if trial is EAGER else "step"
    faults = FaultPlan().stall(rank=1, at=at, step=6, seconds=10.0)
    found = trained(replace(trial, run_dir=tmp_path, observer=WATCHED, faults=faults))
    (incident,) = found[0].incidents
    assert (incident.manifestation.value, incident.ranks) == ("hang", (1,)), incident.sentence


@either
def test_a_killed_job_resumes(trial: Trial, alone: dict[str, str], tmp_path: Path):
    """Scales in buffers are part of a checkpoint; those in other objects are the library's to save."""
    plan = replace(trial, run_dir=tmp_path / "run", directory=tmp_path / "kept")
    with pytest.raises(RankError):
        trained(replace(plan, killed=6), environment=alone)
    for found in trained(plan, environment=alone):
        assert 0 < found.resumed < 6
        assert (found.failures, found.incidents) == ([], [])
