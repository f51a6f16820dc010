"""DeepSpeed as it is shipped, over NCCL: ZeRO 1 to 3 in bfloat16, with PyTorch's own AdamW."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.nccl_ranks import (
    CHECKED,
    EVERY_STEP,
    FAULTY_STEP,
    STALL,
    STEPS,
    WATCHED,
    NcclRanks,
    Seen,
    has_named,
    is_silent,
    needs,
    started,
    went_on,
)
from torchscout.config import ObserverConfig
from torchscout.faults.plan import FaultPlan

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3), needs("deepspeed")]
LAYERS = ("stack.0", "stack.1")
stages = pytest.mark.parametrize("stage", [1, 2, 3])


def answering(rank: int, questions: Iterator[dict[str, Any]], device: str = "cuda") -> Iterator[Seen]:
    os.environ["DS_ACCELERATOR"] = device
    if device == "cuda":
        # DeepSpeed makes the device of this number the current one; ranks may share a device.
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    from tests.support.deepspeed_jobs import Plan, train
    from tests.support.deepspeed_layouts import SOME_SMALL

    torch.use_deterministic_algorithms(True, warn_only=True)  # so that two runs can be compared at all
    for settings in questions:
        zero = SOME_SMALL if settings["stage"] == 3 else {}
        yield Seen.of(train(rank, Plan(bf16=True, zero=zero, **settings)))


@pytest.fixture(scope="module")
def three() -> Iterator[NcclRanks]:
    with started(answering, 3) as ranks:
        yield ranks


@stages
def test_a_healthy_job_is_silent_and_certified(three: NcclRanks, stage: int, tmp_path: Path):
    settings = {"stage": stage, "steps": STEPS}
    checked = three.ask(settings | {"replay": CHECKED, "observer": ObserverConfig(), "run_dir": tmp_path})
    for seen in checked:
        is_silent(seen, LAYERS)
    if stage < 3:  # three ranks do not divide every parameter, and ZeRO 3 does not initialize the rest
        alone = three.ask(settings)
        assert [each.bits for each in checked] == [each.bits for each in alone]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_flipped_bit_of_a_weight_names_its_rank(three: NcclRanks, stage: int, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=2, at="stack.0.up/weight", step=2, bit=2)
    results = three.ask(
        {"stage": stage, "steps": 3, "replay": EVERY_STEP, "faults": faults, "run_dir": tmp_path}
    )
    incident = has_named(results, 2, "sdc")
    assert incident.step == 2
    assert "stack.0.up/weight" in {each.surface for each in incident.records}


@stages
def test_a_flipped_bit_in_what_one_rank_alone_updates_names_that_rank(
    three: NcclRanks, stage: int, tmp_path: Path
):
    results = three.ask({"stage": stage, "steps": 4, "replay": EVERY_STEP, "at_rest": 1, "run_dir": tmp_path})
    (incident,) = results[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 3)
    assert "state/owned" in {each.surface for each in incident.records}


def test_a_flipped_bit_in_what_a_gathered_layer_computes_names_its_rank(three: NcclRanks, tmp_path: Path):
    """In every call but the first, so that it is there again when the layer is replayed."""
    place = f"{LAYERS[1]}/output"
    faults = FaultPlan().flip_bit(rank=1, at=place, step=2, bit=2, calls=range(1, 200))
    results = three.ask({"stage": 3, "steps": 3, "replay": EVERY_STEP, "faults": faults, "run_dir": tmp_path})
    incident = has_named(results, 1, "sdc")
    assert place in {each.surface for each in incident.records}


@stages
def test_a_rank_that_sleeps_before_its_forward_is_named_and_training_goes_on(
    three: NcclRanks, stage: int, tmp_path: Path
):
    faults = FaultPlan().stall(rank=1, at=f"{LAYERS[1]}/forward", step=FAULTY_STEP, seconds=STALL)
    settings = {"stage": stage, "steps": STEPS, "replay": None, "observer": WATCHED, "faults": faults}
    results = three.ask(settings | {"run_dir": tmp_path})
    has_named(results, 1, "hang")
    went_on(results, tmp_path)
