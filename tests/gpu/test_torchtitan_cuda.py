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
from tests.support.ranks import RankError, run_ranks
from torchscout.config import ObserverConfig
from torchscout.faults.plan import FaultPlan

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3), needs("torchtitan")]
LAYERS = ("layers.0", "layers.1")
either = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])


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


def answer(rank: int, question: tuple[dict[str, Any], Path | None], assets: Path) -> Seen:
    return next(answering(rank, iter([question]), assets))


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("assets")


@pytest.fixture(scope="module")
def three(assets: Path) -> Iterator[NcclRanks]:
    with started(answering, 3, assets) as ranks:
        yield ranks


@pytest.mark.parametrize("steps", [STEPS, pytest.param(500, marks=pytest.mark.slow)])
@either
def test_a_healthy_job_is_silent_certified_and_bitwise_the_same(
    three: NcclRanks, graphs: bool, steps: int, tmp_path: Path
):
    settings = {"steps": steps, "graphs": graphs}
    checked = three.ask(({**settings, "replay": CHECKED, "observer": ObserverConfig()}, tmp_path), 400)
    for seen in checked:
        is_silent(seen, LAYERS, steps)
    alone = three.ask((settings, None), 400)
    assert [each.bits for each in checked] == [each.bits for each in alone]


def test_a_flipped_bit_in_what_one_rank_alone_updates_names_that_rank(three: NcclRanks, tmp_path: Path):
    results = three.ask(({"steps": 4, "replay": EVERY_STEP, "spoiled": (1, 2, 0)}, tmp_path))
    (incident,) = results[0].incidents
    assert (incident.manifestation.value, incident.ranks, incident.step) == ("sdc", (1,), 3)
    assert {each.surface for each in incident.records} == {"state/owned"}


@either
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


@either
def test_a_slow_layer_names_its_rank(three: NcclRanks, graphs: bool, tmp_path: Path):
    faults = FaultPlan()
    for layer in LAYERS:
        slow = range(4, STEPS + 1)
        faults = faults.delay(rank=1, at=f"{layer}/forward", step=slow, seconds=0.3, calls=None)
    settings = {"steps": STEPS, "graphs": graphs, "replay": EVERY_STEP, "faults": faults}
    results = three.ask((settings, tmp_path))
    assert [bool(each.fired) for each in results] == [False, True, False]
    named = {(each.manifestation.value, each.ranks) for each in results[0].incidents}
    assert named == {("straggler", (1,))}, results[0].incidents


@either
def test_a_rank_that_sleeps_is_named_and_training_goes_on(three: NcclRanks, graphs: bool, tmp_path: Path):
    at = "step" if graphs else f"{LAYERS[0]}/forward"
    faults = FaultPlan().stall(rank=1, at=at, step=FAULTY_STEP, seconds=STALL)
    settings = {"steps": STEPS, "graphs": graphs, "replay": None, "observer": WATCHED, "faults": faults}
    results = three.ask((settings, tmp_path))
    has_named(results, 1, "hang")
    went_on(results, tmp_path)


@either
def test_a_killed_job_resumes_bitwise(
    three: NcclRanks, assets: Path, graphs: bool, alone: dict[str, str], tmp_path: Path
):
    settings: dict[str, Any] = {"steps": STEPS, "graphs": graphs}
    kept = {**settings, "replay": EVERY_STEP, "directory": tmp_path / "kept"}
    faults = FaultPlan()
    for rank in range(3):
        faults = faults.kill(rank=rank, at="step", step=FAULTY_STEP)
    killed = ({**kept, "faults": faults}, tmp_path / "run")
    with pytest.raises(RankError):
        run_ranks(answer, 3, killed, assets, timeout=180, backend="nccl", environment=alone)
    resumed = three.ask((kept, tmp_path / "run"))
    for plain, seen in zip(three.ask((settings, None)), resumed, strict=True):
        assert (seen.failures, seen.incidents) == ([], [])
        assert 0 < seen.replay["checks"] <= STEPS - FAULTY_STEP + 3
        assert seen.bits == plain.bits
