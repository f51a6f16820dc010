"""TorchTitan's own trainer: nothing changes, what goes wrong is named, and what was kept comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankError, run_ranks
from tests.support.titan_jobs import Told, Trial, make_assets, refusal, train, with_and_without
from torchscout.cli.local_ranks import preload
from torchscout.config import ObserverConfig, Parallelism
from torchscout.faults.fault import Faults

preload("tests.support.titan_jobs")

slow = pytest.mark.slow
REPLAY = range(1, 9)
"""Passes that are not training's own."""
ALL = None
PATIENT = ObserverConfig(floor_seconds=4.0, multiple=3.0, start_seconds=120.0, grace_seconds=8.0)
REPLICATE = {"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}
HSDP = {"data_parallel_replicate_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
INTERLEAVED = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}
CONTEXT = {"context_parallel_degree": 2}
EXPERT = {"expert_parallel_degree": 2}
PARTS = {"tok_embeddings", "layers.0", "layers.1", "lm_head"}


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    make_assets(folder)
    return folder


def check(found: list[tuple[bool, Told]], axes: set[str]) -> set[str]:
    """Nothing changed, nobody was blamed, all was checked on the framework's own groups; what agreed."""
    agreed: set[str] = set()
    for same, told in found:
        assert same
        assert (told.failures, told.incidents, told.unchecked) == ([], [], {})
        assert told.groups == told.along
        assert set(told.groups) == axes
        agreed |= told.agreed
    assert {"optimizer/param", "optimizer/reproduced"} <= agreed
    return agreed


@pytest.mark.parametrize(
    ("parallelism", "axes", "state"),
    [
        pytest.param(REPLICATE, {"dp_replicate"}, "state/parameters", id="replicate"),
        pytest.param(TENSOR, {"fsdp", "tp"}, "state/at_rest", id="tensor"),
        pytest.param({}, {"fsdp"}, "state/at_rest", id="fsdp", marks=slow),
        pytest.param(HSDP, {"dp_replicate", "fsdp"}, "state/parameters", id="hsdp", marks=slow),
        pytest.param(CONTEXT, {"cp"}, "state/at_rest", id="context", marks=slow),
    ],
)
def test_training_is_bitwise_the_same_and_everything_is_checked(
    parallelism: dict[str, Any], axes: set[str], state: str, assets: Path, tmp_path: Path
):
    found = run_ranks(with_and_without, 4, Trial(assets, parallelism), tmp_path, timeout=240)
    assert {state, *(f"{part}/output" for part in PARTS)} <= check(found, axes)


@slow
@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        (PIPELINE, {"layers.0", "layers.1", "layers.2", "layers.3"}),
        (INTERLEAVED, {"0.layers.0", "1.layers.2", "0.layers.1", "1.layers.3"}),
    ],
    ids=["1f1b", "interleaved"],
)
def test_every_stage_of_a_pipeline_is_checked(
    schedule: dict[str, Any], names: set[str], assets: Path, tmp_path: Path
):
    found = run_ranks(with_and_without, 4, Trial(assets, schedule, layers=4), tmp_path, timeout=240)
    assert {f"{name}/output" for name in names} <= check(found, {"pp", "fsdp"})


@slow
def test_experts_with_uneven_rows_are_checked_and_silent(assets: Path, tmp_path: Path):
    trial = Trial(assets, EXPERT, is_mixture=True)
    found = run_ranks(with_and_without, 4, trial, tmp_path, timeout=300)
    experts = "layers.1.moe.routed_experts.inner_experts"
    agreed = check(found, {"fsdp", "ep", "efsdp"})
    assert {f"{experts}/output", f"{experts}/w1_EFD.grad", "all_to_all/captured.received"} <= agreed


@slow
def test_eight_ranks_of_pipeline_tensor_and_data_parallelism(assets: Path, tmp_path: Path):
    trial = Trial(assets, {**PIPELINE, **TENSOR}, layers=2)
    found = run_ranks(with_and_without, 8, trial, tmp_path, timeout=400)
    assert {f"{part}/output" for part in PARTS} <= check(found, {"pp", "tp", "fsdp"})


@pytest.mark.parametrize(
    ("parallelism", "is_mixture"),
    [
        pytest.param(HSDP, False, id="hsdp"),
        pytest.param(PIPELINE, False, id="pipeline", marks=slow),
        pytest.param(EXPERT, True, id="expert", marks=slow),
        pytest.param(TENSOR, False, id="tensor", marks=slow),
        pytest.param(CONTEXT, False, id="context", marks=slow),
    ],
)
def test_a_killed_job_goes_on_bitwise_through_the_override(
    parallelism: dict[str, Any], is_mixture: bool, assets: Path, tmp_path: Path
):
    """With gradient accumulation; schedule, data position and random streams come back too."""
    settings = {
        "replay": {"interval": 1},
        "observer": None,
        "checkpoint": {"directory": str(tmp_path / "kept" / "files")},
        "run_dir": str(tmp_path / "scout"),
    }
    whole = Trial(assets, parallelism, accumulation=2, is_mixture=is_mixture)
    killed = Faults()
    for rank in range(4):
        killed = killed.kill(rank=rank, at="step", step=5)
    kept = replace(whole, overridden=settings, directory=tmp_path / "kept")
    with pytest.raises(RankError):
        run_ranks(train, 4, replace(kept, faults=killed), tmp_path / "killed", timeout=240)
    alone = run_ranks(train, 4, whole, tmp_path / "alone", False, timeout=240)
    resumed = run_ranks(train, 4, kept, tmp_path / "resumed", timeout=240)
    for before, after in zip(alone, resumed, strict=True):
        assert after.failures == []
        assert 3 <= after.resumed <= 4
        assert after.progress == before.progress
        assert after.bits == before.bits


@pytest.mark.parametrize(
    ("parallelism", "ranks", "at", "found"),
    [
        pytest.param({}, 4, "layers.1/output", ("sdc", "rank", (2,)), id="fsdp"),
        pytest.param(HSDP, 4, "layers.1/output", ("sdc", "rank", (2,)), id="hsdp", marks=slow),
        pytest.param(PIPELINE, 4, "layers.1/output", ("sdc", "peer_group", (2, 3)), id="pp", marks=slow),
    ],
)
def test_a_wrong_number_names_the_rank(
    parallelism: dict[str, Any], ranks: int, at: str, found: Any, assets: Path, tmp_path: Path
):
    faults = Faults().flip_bit(rank=2, at=at, step=2, bit=20, calls=REPLAY)
    trial = Trial(assets, parallelism, steps=3, faults=faults, directory=tmp_path)
    told = run_ranks(train, ranks, trial, tmp_path, timeout=240)
    assert told[2].fired
    assert told[0].found == {found}, [each.sentence for each in told[0].incidents]
    assert told[0].status["checkpoint"]["latest"] == 1  # nothing is trusted after that


@slow
def test_a_wrong_number_in_experts_names_their_holders(assets: Path, tmp_path: Path):
    at = "layers.1._checkpoint_wrapped_module.moe.routed_experts.inner_experts/output"
    # Training calls them twice: activation checkpointing computes them again in backward.
    faults = Faults().flip_bit(rank=2, at=at, step=2, bit=20, calls=range(2, 9))
    trial = Trial(assets, EXPERT, is_mixture=True, steps=3, faults=faults)
    told = run_ranks(train, 4, trial, tmp_path, timeout=240)
    assert told[2].fired
    assert told[0].found == {("sdc", "peer_group", (0, 2))}, [each.sentence for each in told[0].incidents]


@slow
def test_a_slow_layer_names_its_rank(assets: Path, tmp_path: Path):
    faults = Faults()
    for layer in (0, 1):
        at = f"layers.{layer}/forward"
        faults = faults.delay(rank=2, at=at, step=range(3, 9), seconds=0.4, calls=ALL)
    told = run_ranks(train, 4, Trial(assets, REPLICATE, steps=8, faults=faults), tmp_path, timeout=240)
    assert told[2].fired >= 8
    assert told[0].found == {("straggler", "rank", (2,))}, [each.sentence for each in told[0].incidents]


@slow
def test_a_slow_link_names_its_process_group(assets: Path, tmp_path: Path):
    """Of three groups of shards; two could only differ. All are within one machine, and so is the fault."""
    faults = Faults().slow_collective(
        ranks=(2, 3), at="all_gather@mesh_fsdp", axis="shard", step=range(3, 9), seconds=0.4
    )
    trial = Trial(assets, {"data_parallel_replicate_degree": 3}, steps=7, faults=faults)
    told = run_ranks(train, 6, trial, tmp_path, timeout=300)
    assert told[2].fired >= 4
    assert told[0].found == {("straggler", "machine", (0, 1, 2, 3, 4, 5))}, told[0].incidents
    assert "hard group {2, 3} is slow" in told[0].incidents[0].sentence


@slow
def test_a_late_rank_is_named(assets: Path, tmp_path: Path):
    faults = Faults().stall(rank=2, at="layers.1/forward", step=4, seconds=20.0)
    trial = Trial(assets, steps=5, faults=faults, replay=None, observer=PATIENT)
    told = run_ranks(train, 4, trial, tmp_path, timeout=240)
    assert told[2].fired == 1
    assert told[0].found == {("hang", "rank", (2,))}, [each.sentence for each in told[0].incidents]


@pytest.mark.parametrize(
    ("changes", "given", "said"),
    [
        ({"training.disable_cuda_graphs": False}, {}, "--training.disable_cuda_graphs"),
        ({"parallelism.spmd_backend": "spmd_types"}, {}, "partial_dtensor"),
        ({}, {"parallelism": Parallelism(replica=1)}, "the Trainer alone"),
    ],
    ids=["graphs", "spmd_types", "parallelism"],
)
@slow
def test_what_cannot_be_watched_is_said_in_one_sentence(
    changes: dict[str, Any], given: dict[str, Any], said: str, assets: Path
):
    (told,) = run_ranks(refusal, 1, Trial(assets), changes, given)
    assert said in told
