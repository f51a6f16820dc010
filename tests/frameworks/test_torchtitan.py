"""TorchTitan's own trainer: nothing changes, everything is checked, and what cannot be is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import titan_layouts
from tests.support.ranks import LiveRanks, RankError, run_ranks
from tests.support.scripts import EXAMPLES, ROOT, torchrun
from tests.support.titan_jobs import Trial, answering, attach_to_another_version, make_assets, train
from tests.support.titan_layouts import (
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    EXPERTS,
    FULL,
    HSDP,
    INTERLEAVED,
    PATIENT,
    PIPELINE,
    PIPELINE_TENSOR,
    REPLICATE,
    TENSOR,
)
from torchscout.config import Parallelism

__all__ = ["answering"]

assets = titan_layouts.assets
slow = pytest.mark.slow
PARTS = {"tok_embeddings", "layers.0", "layers.1", "lm_head"}
CHUNKS = {"0.tok_embeddings", "0.layers.0", "0.layers.1", "0.layers.2", "1.layers.3", "1"}
"""The last stage has but a norm and the output layer, and is one part of the model."""


@pytest.mark.parametrize(
    ("removed", "expected"),
    [
        (None, "torchtitan 0.4.0 is newer than 0.3.0, the newest release that torchscout was tried with"),
        ("lr_schedulers", "torchtitan 0.4.0 has no Trainer.lr_schedulers"),
    ],
)
def test_a_newer_release_is_accepted_unless_it_lacks_something(
    assets: Path, removed: str | None, expected: str
):
    ((seen,),) = run_ranks(attach_to_another_version, 1, Trial(assets=assets), removed, timeout=120)
    assert seen.startswith(f"{expected}; ")


def is_healthy(ranks: LiveRanks, trial: Trial, axes: set[str], folder: Path) -> set[str]:
    """Nothing changed, nobody was blamed, all was checked on the framework's own groups; what agreed."""
    alone, checked = ranks.ask((trial, None), 300), ranks.ask((trial, folder), 300)
    agreed: set[str] = set()
    for plain, seen in zip(alone, checked, strict=True):
        assert (seen.failures, seen.incidents, seen.unchecked) == ([], [], {})
        assert (seen.bits, seen.progress) == (plain.bits, plain.progress)
        assert seen.groups == seen.along
        assert set(seen.groups) == axes
        agreed |= seen.agreed
        assert seen.uneven or not trial.is_mixture
    assert {"optimizer/param", "optimizer/reproduced"} <= agreed
    return agreed


@pytest.mark.long_cases("replicate")
@pytest.mark.parametrize(
    ("parallelism", "axes", "state"),
    [
        pytest.param(REPLICATE, {"dp_replicate"}, "state/parameters", id="replicate"),
        pytest.param(TENSOR, {"fsdp", "tp"}, "state/owned", id="tensor", marks=slow),
        pytest.param({}, {"fsdp"}, "state/owned", id="fsdp", marks=slow),
        pytest.param(HSDP, {"dp_replicate", "fsdp"}, "state/parameters", id="hsdp", marks=slow),
        pytest.param(CONTEXT, {"cp"}, "state/owned", id="context", marks=slow),
        pytest.param(FULL, {"dp_shard", "tp"}, "state/owned", id="full_dtensor", marks=slow),
    ],
)
def test_training_is_bitwise_the_same_and_everything_is_checked(
    four: LiveRanks, parallelism: dict[str, Any], axes: set[str], state: str, assets: Path, tmp_path: Path
):
    agreed = is_healthy(four, Trial(assets, parallelism), axes, tmp_path)
    assert {state, *(f"{part}/output" for part in PARTS)} <= agreed


@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        pytest.param(INTERLEAVED, CHUNKS, id="interleaved", marks=slow),
        pytest.param(PIPELINE, PARTS | {"layers.2", "layers.3"}, id="1f1b", marks=slow),
    ],
)
def test_every_stage_of_a_pipeline_is_checked(
    four: LiveRanks, schedule: dict[str, Any], names: set[str], assets: Path, tmp_path: Path
):
    agreed = is_healthy(four, Trial(assets, schedule, layers=4), {"pp", "fsdp"}, tmp_path)
    assert {f"{name}/output" for name in names} <= agreed


@slow
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "in pieces"])
def test_neither_accumulation_nor_validation_nor_a_loss_in_pieces_changes_that(
    four: LiveRanks, chunked: bool, assets: Path, tmp_path: Path
):
    trial = Trial(assets, chunked=chunked, accumulation=2, validated=True)
    assert "layers.1/output" in is_healthy(four, trial, {"fsdp"}, tmp_path)


@slow
def test_experts_with_uneven_rows_are_checked_and_silent(four: LiveRanks, assets: Path, tmp_path: Path):
    agreed = is_healthy(
        four, Trial(assets, EXPERT, is_mixture=True, steps=8), {"fsdp", "ep", "efsdp"}, tmp_path
    )
    assert {f"{EXPERTS}/output", f"{EXPERTS}/w1_EFD.grad", "all_to_all/captured.received"} <= agreed


@slow
def test_eight_ranks_of_pipeline_tensor_and_data_parallelism(eight: LiveRanks, assets: Path, tmp_path: Path):
    agreed = is_healthy(eight, Trial(assets, PIPELINE_TENSOR), {"pp", "tp", "fsdp"}, tmp_path)
    assert {f"{part}/output" for part in PARTS} <= agreed


@slow
def test_eight_ranks_of_expert_and_tensor_parallelism(eight: LiveRanks, assets: Path, tmp_path: Path):
    trial = Trial(assets, EXPERT_TENSOR, is_mixture=True)
    agreed = is_healthy(eight, trial, {"fsdp", "tp", "ep", "efsdp"}, tmp_path)
    assert {f"{EXPERTS}/output", "all_to_all/captured.received"} <= agreed


@pytest.mark.long_cases("graphs")
@pytest.mark.parametrize(
    "trial",
    [
        pytest.param({"graphs": True}, id="graphs"),
        pytest.param({"claimed": {"spmd_backend": "spmd_types"}}, id="spmd_types", marks=slow),
    ],
)
def test_the_defaults_are_replayed_and_training_is_untouched(
    four: LiveRanks, trial: dict[str, Any], assets: Path, tmp_path: Path
):
    """PyTorch 2.13 is too old for spmd_types: the trainer only says that it is on. Without CUDA, TorchTitan
    trains eagerly although graphs are asked for."""
    watched = Trial(assets, steps=2, observer=PATIENT, **trial)
    alone, attached = four.ask((watched, None), 200), four.ask((watched, tmp_path), 200)
    for plain, seen in zip(alone, attached, strict=True):
        assert (seen.bits, seen.progress) == (plain.bits, plain.progress)
        assert (seen.failures, seen.incidents, seen.unchecked) == ([], [], {})
        assert "layers.1/output" in seen.agreed
        assert (seen.status["step"], seen.status["replay"]["certified"]) == (2, 2)


@slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"given": {"parallelism": Parallelism(replica=1)}}, "pass only the Trainer"),
    ],
    ids=["parallelism"],
)
def test_what_a_user_must_change_is_refused(changes: dict[str, Any], said: str, assets: Path, tmp_path: Path):
    with pytest.raises(RankError, match=said):
        run_ranks(train, 1, Trial(assets, **changes), tmp_path, timeout=120)


@slow
def test_the_example_trains_and_goes_on_from_its_checkpoint(tmp_path: Path):
    folder = EXAMPLES / "frameworks"
    assert (folder / "torchtitan_llama.py").read_text().count("\n") < 60
    (tmp_path / "tests" / "assets").mkdir(parents=True)  # as in TorchTitan's own repository
    make_assets(tmp_path / "tests" / "assets")
    job = ["-m", "tests.support.titan_script", "--module", "torchtitan_llama", "--config", "watched"]
    small = ["--training.local-batch-size", 1, "--training.seq-len", 64, "--training.steps"]
    losses: list[float] = []
    for first, last in ((1, 7), (6, 11)):
        printed = torchrun(4, [*job, *small, last], tmp_path, PYTHONPATH=f"{ROOT}:{folder}")
        seen = re.findall(r"step: +(\d+) .*?loss: +(\d+\.\d+)", re.sub(r"\x1b\[\d+m", "", printed))
        assert sorted({int(step) for step, _ in seen}) == [*range(first, last + 1)], printed
        losses += [float(loss) for _, loss in seen]
    assert losses[-1] < losses[0]
    assert not [*tmp_path.glob("outputs/scout/incidents.jsonl")]
