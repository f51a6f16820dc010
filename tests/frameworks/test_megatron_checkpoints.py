"""The real Megatron-Core: jobs go on from checkpoints, killed or not, and from none after wrong numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.megatron_jobs import Result, Trial, answering, train  # noqa: F401  conftest.py asks for it
from tests.support.megatron_layouts import (
    EXPERTS,
    FSDP,
    GATHERED,
    INSTANCES,
    LARGE,
    MIXED,
    PIPELINE,
    RECOMPUTED,
    REPLICAS,
    SCALED,
    SHARDED,
    TENSOR,
    VIRTUAL,
    each_of,
)
from tests.support.ranks import LiveRanks, RankError, run_ranks
from torchscout.config import ReplayConfig
from torchscout.faults.plan import FaultPlan

KEPT = {
    "experts, optimizer shards, bfloat16": Trial(experts=4, expert=2, sharded=True, dtype="bfloat16"),
}
ALSO_KEPT = {
    "two instances": INSTANCES,
    "a loss scale": SCALED,
    "tensor": Trial(tensor=2, sequence=True),
    "pipeline": PIPELINE,
    "replicas": REPLICAS,
    "recomputed": RECOMPUTED,
    "parameter shards": FSDP,
    "parameter shards, bfloat16": replace(FSDP, dtype="bfloat16"),
    "parameter shards, tensor": replace(FSDP, tensor=2),
    "virtual pipeline": VIRTUAL,
    "context": Trial(context=2),
    "experts, gathered tokens": GATHERED,
    "optimizer shards, overlapping": Trial(sharded=True, overlap=True),
    "bfloat16": Trial(dtype="bfloat16"),
    "experts": EXPERTS,
    "experts, tensor": MIXED,
}
UNHEARD = replace(GATHERED, replay=ReplayConfig(interval=1))
"""Tokens are not sent by all-to-all, though it is asked for: checkpoints do not wait for that."""


@pytest.mark.parametrize(
    "trial",
    [
        *each_of({name: (each,) for name, each in (KEPT | ALSO_KEPT).items()}, pytest.mark.slow),
        pytest.param(UNHEARD, id="no all-to-all", marks=pytest.mark.slow),
    ],
)
def test_a_job_goes_on_from_its_checkpoint_bitwise_as_if_nothing_had_been(
    four: LiveRanks, trial: Trial, tmp_path: Path
):
    through = four.ask((trial, None), 120)
    kept = replace(trial, directory=tmp_path / "kept")
    four.ask((replace(kept, steps=4), tmp_path / "first"), 120)
    again = four.ask((kept, tmp_path / "second"), 120)
    for plain, result in zip(through, again, strict=True):
        goes_on(plain, result)


def goes_on(plain: Result, result: Result) -> None:
    assert result.resumed is not None
    assert result.resumed.step == 4
    assert result.failures == []
    assert result.bits == {step: plain.bits[step] for step in (5, 6)}


KILLED_OF_EIGHT = (
    "tensor, pipeline",
    "tensor, context, replicas",
    "experts, pipeline",
    "tensor, pipeline, sequence, experts, optimizer shards",
)


@pytest.mark.long_cases("tensor, optimizer shards")
@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(Trial(tensor=2, sharded=True), id="tensor, optimizer shards"),
        *each_of({name: (each,) for name, each in (KEPT | ALSO_KEPT).items()}, pytest.mark.slow),
    ],
)
def test_a_killed_job_goes_on_bitwise(four: LiveRanks, trial: Trial, tmp_path: Path):
    goes_on_after_a_kill(four, 4, trial, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", KILLED_OF_EIGHT)
def test_a_killed_job_goes_on_bitwise_where_parallelisms_meet(eight: LiveRanks, layout: str, tmp_path: Path):
    goes_on_after_a_kill(eight, 8, replace(LARGE[layout][0], steps=6), tmp_path)


def goes_on_after_a_kill(live: LiveRanks, size: int, trial: Trial, folder: Path) -> None:
    kept = replace(trial, directory=folder / "kept")
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, size, replace(kept, killed=5), folder / "first", timeout=200)
    through, again = live.ask((trial, None), 200), live.ask((kept, folder / "second"), 200)
    for plain, result in zip(through, again, strict=True):
        goes_on(plain, result)


def spoiled(trial: Trial, rank: int = 1, part: str = "decoder.layers.0.mlp") -> Trial:
    """A weight has a wrong bit from the update of step 4 on."""
    return replace(
        trial, faults=FaultPlan().flip_bit(rank=rank, at=f"{part}.linear_fc1/weight", step=4, bit=20)
    )


EXPERT = "decoder.layers.0.mlp.experts.local_experts.1"
EXCLUDED = {
    "tensor": (spoiled(TENSOR),),
    "tensor and sequence": (spoiled(Trial(tensor=2, sequence=True)),),
    "pipeline": (spoiled(PIPELINE, rank=2),),
    "virtual pipeline": (spoiled(VIRTUAL, part="0.decoder.layers.0.mlp"),),
    "context": (spoiled(Trial(context=2)),),
    "experts": (spoiled(EXPERTS, rank=3, part=EXPERT),),
    "experts, gathered tokens": (spoiled(GATHERED, rank=3, part=EXPERT),),
    "experts, tensor": (spoiled(MIXED, rank=3, part=EXPERT),),
    "optimizer shards": (replace(SHARDED, spoiled=(1, 3)),),
    "parameter shards": (replace(FSDP, spoiled=(1, 3)),),
}


@pytest.mark.slow_cases("replicas")
@pytest.mark.parametrize(
    "trial", [pytest.param(spoiled(REPLICAS), id="replicas"), *each_of(EXCLUDED, pytest.mark.slow)]
)
def test_no_checkpoint_after_wrong_numbers_is_loaded(four: LiveRanks, trial: Trial, tmp_path: Path):
    goes_back_to_before(four, trial, tmp_path)


EXCLUDED_OF_EIGHT = {
    "tensor, pipeline": (spoiled(LARGE["tensor, pipeline"][0], rank=5),),
    "experts, pipeline": (spoiled(replace(LARGE["experts, pipeline"][0], steps=6), rank=5, part=EXPERT),),
}


@pytest.mark.slow
@pytest.mark.parametrize("trial", each_of(EXCLUDED_OF_EIGHT))
def test_no_checkpoint_after_wrong_numbers_is_loaded_with_combined_parallelisms(
    eight: LiveRanks, trial: Trial, tmp_path: Path
):
    goes_back_to_before(eight, trial, tmp_path)


def goes_back_to_before(ranks: LiveRanks, trial: Trial, folder: Path) -> None:
    kept = replace(trial, directory=folder / "kept")
    for result in ranks.ask((kept, folder / "first"), 200):
        assert {each.manifestation.value for each in result.incidents} == {"sdc"}
        assert result.status["checkpoint"]["poisoned"] == 4
        assert result.status["checkpoint"]["latest"] < 4
    healthy = replace(trial, faults=FaultPlan(), spoiled=None)
    through = ranks.ask((healthy, None), 200)
    again = ranks.ask((replace(healthy, directory=kept.directory), folder / "second"), 200)
    for plain, result in zip(through, again, strict=True):
        assert result.resumed is not None
        assert 1 <= result.resumed.step < 4
        assert result.bits == {step: bits for step, bits in plain.bits.items() if step > result.resumed.step}
