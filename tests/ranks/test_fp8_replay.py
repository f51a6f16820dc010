"""Layers in float8 with delayed scaling: replays leave the scales of training as they are."""

from __future__ import annotations

from pathlib import Path

from tests.support.fp8_layers import Float8Net
from tests.support.graphed_jobs import STEPS, Trial, train
from tests.support.ranks import run_ranks
from torchscout.faults.plan import FaultPlan

EAGER = {"build": Float8Net, "warm": STEPS}


def test_training_and_its_scales_are_bitwise_the_same(tmp_path: Path):
    alone = run_ranks(train, 3, Trial(**EAGER), timeout=120)
    for plain, found in zip(alone, run_ranks(train, 3, Trial(tmp_path, **EAGER), timeout=120), strict=True):
        assert found.bits == plain.bits
        assert (found.incidents, found.failures, found.unchecked) == ([], [], {})
        assert {"stack.0/output", "stack.1/output", "stack.1.down/weight.grad"} <= found.agreed
        assert found.replay["certified"] == STEPS


def test_a_wrong_number_in_a_layer_names_its_rank(tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=2, at="stack.1.up/output", step=4, bit=20, calls=range(1, 200))
    for found in run_ranks(train, 3, Trial(tmp_path, faults=faults, **EAGER), timeout=120):
        (incident,) = found.incidents
        assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (2,), 4)
