"""The real Megatron-Core over NCCL, as it is shipped: bfloat16, with its distributed optimizer."""

from __future__ import annotations

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

pytestmark = [pytest.mark.gpu, needs("megatron")]
LAYERS = ("decoder.layers.0", "decoder.layers.1")


def answering(
    rank: int, questions: Iterator[tuple[dict[str, Any], Path | None]], device: str = "cuda"
) -> Iterator[Seen]:
    from tests.support.megatron_jobs import Trial, train

    torch.use_deterministic_algorithms(True, warn_only=True)  # so that two runs can be compared at all
    for settings, run_dir in questions:
        trial = Trial(device=device, sharded=True, dtype="bfloat16", **settings)
        yield Seen.of(train(rank, trial, run_dir))


@pytest.fixture(scope="module")
def three() -> Iterator[NcclRanks]:
    with started(answering, 3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[NcclRanks]:
    with started(answering, 4) as ranks:
        yield ranks


REPLICAS = pytest.param("three", 1, id="replicas", marks=pytest.mark.nccl(3))
TENSOR = pytest.param("four", 2, id="tensor", marks=pytest.mark.nccl(4))
layouts = pytest.mark.parametrize(("ranks", "tensor"), [REPLICAS, TENSOR])


@layouts
def test_a_healthy_job_is_silent_certified_and_bitwise_the_same(
    ranks: str, tensor: int, tmp_path: Path, request: pytest.FixtureRequest
):
    live: NcclRanks = request.getfixturevalue(ranks)
    settings = {"tensor": tensor, "steps": STEPS}
    checked = live.ask((settings | {"replay": CHECKED, "observer": ObserverConfig()}, tmp_path))
    for seen in checked:
        is_silent(seen, LAYERS)
    alone = live.ask((settings, None))
    assert [each.bits for each in checked] == [each.bits for each in alone]


@layouts
def test_a_flipped_bit_in_what_one_rank_alone_updates_names_that_rank(
    ranks: str, tensor: int, tmp_path: Path, request: pytest.FixtureRequest
):
    live: NcclRanks = request.getfixturevalue(ranks)
    settings = {"tensor": tensor, "steps": 4, "replay": EVERY_STEP, "spoiled": (1, 2)}
    results = live.ask((settings, tmp_path))
    (incident,) = results[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 3)
    assert {each.surface for each in incident.records} == {"state/owned"}


@pytest.mark.nccl(3)
def test_a_flipped_bit_in_what_a_layer_computes_names_its_rank(three: NcclRanks, tmp_path: Path):
    """In every call but the first, so that it is there again when the layer is replayed."""
    place = f"{LAYERS[1]}/output"
    faults = FaultPlan().flip_bit(rank=2, at=place, step=2, bit=5, calls=range(1, 200))
    results = three.ask(({"steps": 4, "replay": EVERY_STEP, "faults": faults}, tmp_path))
    incident = has_named(results, 2, "sdc")
    assert place in {each.surface for each in incident.records}


@layouts
def test_a_rank_that_sleeps_before_its_forward_is_named_and_training_goes_on(
    ranks: str, tensor: int, tmp_path: Path, request: pytest.FixtureRequest
):
    live: NcclRanks = request.getfixturevalue(ranks)
    faults = FaultPlan().stall(rank=1, at=f"{LAYERS[0]}/forward", step=FAULTY_STEP, seconds=STALL)
    settings = {"tensor": tensor, "steps": STEPS, "replay": None, "observer": WATCHED, "faults": faults}
    results = live.ask((settings, tmp_path))
    has_named(results, 1, "hang")
    went_on(results, tmp_path)
