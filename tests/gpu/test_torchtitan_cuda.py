"""TorchTitan's own trainer over NCCL, with FSDP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

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

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3), needs("torchtitan")]
LAYERS = ("layers.0", "layers.1")


def answering(
    rank: int,
    questions: Iterator[tuple[dict[str, Any], Path | None]],
    assets: Path,
    device: str = "cuda",
) -> Iterator[Seen]:
    os.environ["TITAN_DEVICE"] = device
    if device == "cuda":
        # TorchTitan makes the device of this number the current one; ranks may share a device.
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    from tests.support.titan_jobs import Trial, make_assets, train

    if rank == 0:
        make_assets(assets)
    dist.barrier()
    for settings, folder in questions:
        yield Seen.of(train(rank, Trial(assets, **settings), folder))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NcclRanks]:
    with started(answering, 3, tmp_path_factory.mktemp("assets")) as ranks:
        yield ranks


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_healthy_job_is_silent_certified_and_bitwise_the_same(
    three: NcclRanks, graphs: bool, tmp_path: Path
):
    settings = {"steps": STEPS, "graphs": graphs}
    checked = three.ask(({**settings, "replay": CHECKED, "observer": ObserverConfig()}, tmp_path))
    for seen in checked:
        is_silent(seen, LAYERS)
    alone = three.ask((settings, None))
    assert [each.bits for each in checked] == [each.bits for each in alone]


def test_a_flipped_bit_in_what_one_rank_alone_updates_names_that_rank(three: NcclRanks, tmp_path: Path):
    results = three.ask(({"steps": 4, "replay": EVERY_STEP, "spoiled": (1, 2, 0)}, tmp_path))
    (incident,) = results[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 3)
    assert {each.surface for each in incident.records} == {"state/owned"}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_flipped_bit_in_what_a_layer_computes_names_its_rank(
    three: NcclRanks, graphs: bool, tmp_path: Path
):
    """In every call but the first, so that training is right and the replay of the layer is not."""
    place = f"{LAYERS[1]}/output"
    # A graph calls no hook, so that every call in its step is a replay.
    step, calls = (4, None) if graphs else (2, range(1, 200))
    faults = FaultPlan().flip_bit(rank=2, at=place, step=step, bit=20, calls=calls)
    settings = {"steps": step + 1, "graphs": graphs, "replay": EVERY_STEP, "faults": faults}
    results = three.ask((settings, tmp_path))
    incident = has_named(results, 2, "sdc")
    assert place in {each.surface for each in incident.records}


def test_a_rank_that_sleeps_before_its_forward_is_named_and_training_goes_on(
    three: NcclRanks, tmp_path: Path
):
    faults = FaultPlan().stall(rank=1, at=f"{LAYERS[0]}/forward", step=FAULTY_STEP, seconds=STALL)
    results = three.ask(({"steps": STEPS, "replay": None, "observer": WATCHED, "faults": faults}, tmp_path))
    has_named(results, 1, "hang")
    went_on(results, tmp_path)
