"""The real Megatron-Core: meshes, replay without interference, what is refused, and the example."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.megatron_jobs import Trial, answering  # noqa: F401  the ranks of conftest.py ask for it
from tests.support.megatron_layouts import (
    FSDP,
    HEALTHY,
    LARGE,
    LAYER,
    MORE,
    NO_REPLAY,
    SCALED,
    each_of,
)
from tests.support.ranks import LiveRanks
from tests.support.scripts import EXAMPLES, losses_in, torchrun
from torchscout.config import ReplayConfig


@pytest.mark.slow_cases("experts, optimizer shards", "tensor and sequence")
@pytest.mark.long_cases("virtual pipeline")
@pytest.mark.parametrize(("trial", "layers"), each_of(HEALTHY) + each_of(MORE, pytest.mark.slow))
def test_training_is_bitwise_the_same_with_a_check_at_every_step(
    four: LiveRanks, trial: Trial, layers: str, tmp_path: Path
):
    is_healthy(four, trial, layers, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("trial", "layers"), each_of(LARGE))
def test_training_is_the_same_where_parallelisms_meet(
    eight: LiveRanks, trial: Trial, layers: str, tmp_path: Path
):
    is_healthy(eight, trial, layers, tmp_path)


def is_healthy(ranks: LiveRanks, trial: Trial, layers: str, run_dir: Path) -> None:
    alone = ranks.ask((trial, None), 200)
    checked = ranks.ask((trial, run_dir), 200)
    for plain, result in zip(alone, checked, strict=True):
        assert ([each.sentence for each in result.incidents], result.failures) == ([], [])
        assert result.bits == plain.bits
        assert result.agreed >= {f"{each}/output" for each in LAYER.get(layers, ())}
        assert result.agreed >= {f"{each}/parameters" for each in LAYER.get(layers, ())}
        assert result.agreed >= {"optimizer/reproduced", "optimizer/update"}
        assert ("state/parameters" in result.agreed) is not trial.fsdp
        assert ("state/owned" in result.agreed) is (trial.sharded or trial.dtype != "float32")
        assert ("all_to_all/captured.received" in result.agreed) is (
            layers == "parts" and trial.dispatcher == "alltoall"
        )
        assert result.places == {name: result.groups[name] for name in result.places}
        assert {name: why for name, why in result.unchecked.items() if not _may_be(name, str(why))} == {}


def _may_be(name: str, why: str) -> bool:
    """What a healthy run may leave unchecked: skipped updates, an embedding that the output layer is given,
    experts that nobody asked."""
    return "did not step" in why or name == "output_layer/weight.grad" or "experts" in name


@pytest.mark.long
def test_shards_are_found_after_steps_without_a_check_too(four: LiveRanks, tmp_path: Path):
    for result in four.ask((replace(FSDP, steps=4, replay=ReplayConfig(interval=2)), tmp_path), 120):
        assert result.unchecked == {}
        assert result.agreed >= {f"{each}/output" for each in LAYER["layers"]}


@pytest.mark.long
def test_a_skipped_update_ends_a_step_and_is_no_update(four: LiveRanks, tmp_path: Path):
    for result in four.ask((SCALED, tmp_path), 120):
        assert result.scales == [2.0**18, 2.0**17, 2.0**17, 2.0**17, 2.0**18, 2.0**18]
        assert (result.status["step"], result.status["replay"]["checks"]) == (6, 6)
        updates = {each.step for each in result.records if each.surface == "optimizer/update"}
        assert updates == {3, 4, 5, 6}


REFUSED = {
    "experts in shards": (NO_REPLAY, "Megatron-FSDP is not supported with experts"),
    "no peers": (
        Trial(pipeline=4, virtual=2, layers=8, microbatches=4),
        "no other rank does the same work",
    ),
}


@pytest.mark.parametrize(
    ("trial", "why"),
    [pytest.param(*each, id=name, marks=pytest.mark.slow) for name, each in REFUSED.items()],
)
def test_an_unsupported_setting_is_reported_in_one_sentence_and_training_is_unchanged(
    four: LiveRanks, trial: Trial, why: str, tmp_path: Path
):
    trial = replace(trial, steps=2)
    alone, attached = four.ask((trial, None), 120), four.ask((trial, tmp_path), 120)
    for plain, result in zip(alone, attached, strict=True):
        assert result.bits == plain.bits
        assert result.failures == []
        assert result.status["replay"] == {"off": why}
        assert result.places == {name: result.groups[name] for name in result.places}


@pytest.mark.slow
def test_the_example_trains_and_goes_on_from_its_checkpoint(tmp_path: Path):
    script = EXAMPLES / "frameworks" / "megatron_core.py"
    assert script.read_text().count("\n") < 60
    losses: dict[int, float] = {}
    for first in (1, 6):
        printed = losses_in(torchrun(4, ["-m", "tests.support.megatron_script", script], tmp_path))
        assert [*printed] == [*range(first, first + 5)]
        losses |= printed
    assert losses[10] < losses[1]
    assert not [*tmp_path.glob("scout-run-*/incidents.jsonl")]
