"""Hugging Face's own Trainer, and a loop with Accelerate: nothing changes, and what goes wrong is named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import deepspeed_jobs
from tests.support.deepspeed_layouts import SOME_SMALL, each_of, miscalculated, weight
from tests.support.hangs import QUICK, STALL
from tests.support.huggingface_jobs import Trial, answering, train
from tests.support.ranks import LiveRanks, RankError, run_ranks
from tests.support.scripts import EXAMPLES, torchrun
from torchscout.config import CheckpointConfig, ReplayConfig
from torchscout.faults.plan import FaultPlan
from torchscout.plugins.huggingface import ResiliencyCallback, trusted_checkpoint
from torchscout.testing.local_ranks import preload

preload("tests.support.huggingface_jobs")

slow = pytest.mark.slow
REPLAYED = range(2, 200)
"""Passes that are not training's own, of which there are two in a step."""
LLAMA = {"model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"}
GPT2 = {"transformer.wte", "transformer.h.0", "transformer.h.1"}


@pytest.fixture(scope="module")
def three() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 3) as ranks:
        yield ranks


@pytest.mark.slow_cases("trainer")
@pytest.mark.parametrize(
    ("trial", "parts"),
    [
        pytest.param(Trial(), LLAMA, id="trainer"),
        pytest.param(Trial(checkpointing=True), LLAMA, id="trainer, activations recomputed", marks=slow),
        pytest.param(Trial(family="gpt2"), GPT2, id="trainer, tied weights", marks=slow),
        pytest.param(Trial("loop"), LLAMA, id="accelerate"),
    ],
)
def test_training_is_bitwise_the_same_with_a_check_at_every_step(
    three: LiveRanks, trial: Trial, parts: set[str], tmp_path: Path
):
    alone, checked = three.ask((trial, None), 120), three.ask((trial, tmp_path), 120)
    for plain, result in zip(alone, checked, strict=True):
        assert (result.failures, result.found) == ([], [])
        assert len(plain.bits) == 6
        assert result.bits == plain.bits
        assert {f"{part}/output" for part in parts} <= result.agreed
        assert {"state/parameters", "state/optimizer", "optimizer/reproduced"} <= result.agreed
        # A step is what ends an accumulation, and nothing else.
        assert (result.status["step"], result.status["replay"]["checks"]) == (6, 6)


def test_a_cache_in_training_is_reported_and_changes_nothing(three: LiveRanks, tmp_path: Path):
    trial = Trial("loop", steps=2, cached=True)
    alone, checked = three.ask((trial, None), 120), three.ask((trial, tmp_path), 120)
    for plain, result in zip(alone, checked, strict=True):
        assert result.bits == plain.bits
        assert (result.failures, result.found) == ([], [])
        reasons = {name: why for name, why in result.unchecked.items() if name.startswith("model.layers")}
        assert reasons
        assert all("set config.use_cache=False" in str(why) for why in reasons.values()), reasons


@pytest.mark.slow_cases("trainer")
@pytest.mark.parametrize("kind", ["trainer", "loop"])
def test_a_wrong_number_names_its_rank(three: LiveRanks, kind: str, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=1, at="model.layers.1/output", step=2, bit=20, calls=REPLAYED)
    results = three.ask((Trial(kind, steps=3, faults=faults), tmp_path), 120)
    assert results[1].fired
    assert {each[:3] for each in results[0].found} == {("sdc", "rank", (1,))}, results[0].incidents
    assert results[0].status["replay"]["certified"] == 1


@pytest.mark.slow
def test_a_slow_rank_is_named(three: LiveRanks, tmp_path: Path):
    faults = FaultPlan()
    for layer in (0, 1):
        at = f"model.layers.{layer}/forward"
        faults = faults.delay(rank=2, at=at, step=range(2, 6), seconds=0.25, calls=None)
    results = three.ask((Trial(steps=5, faults=faults), tmp_path), 120)
    assert results[2].fired
    assert [each[:3] for each in results[0].found] == [("straggler", "rank", (2,))], results[0].incidents


@pytest.mark.slow
def test_a_late_rank_is_named(three: LiveRanks, tmp_path: Path):
    faults = FaultPlan().stall(rank=2, at="model.layers.1/forward", step=5, seconds=STALL)
    results = three.ask((Trial(replay=None, observer=QUICK, faults=faults), tmp_path), 120)
    assert [each.fired for each in results] == [0, 0, 1]
    assert [each[:3] for each in results[0].found] == [("hang", "rank", (2,))], results[0].incidents


@pytest.mark.long
def test_a_killed_trainer_goes_on_bitwise_from_a_checkpoint_that_can_be_trusted(tmp_path: Path):
    trial = Trial(steps=7, replay=ReplayConfig(interval=2))
    alone = run_ranks(train, 2, trial, None, timeout=120)
    trial = replace(trial, folder=tmp_path / "out")
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, 2, replace(trial, killed=6), tmp_path / "first", timeout=120)
    trusted = trusted_checkpoint(tmp_path / "out")
    assert trusted == str(tmp_path / "out" / "checkpoint-4")
    again = run_ranks(train, 2, replace(trial, resumed=trusted), tmp_path / "second", timeout=120)
    for plain, result in zip(alone, again, strict=True):
        assert (result.resumed, result.failures, result.found) == (4, [], [])
        # Checks go on at the steps of the job, not at those since it was started again.
        assert (result.status["step"], result.status["replay"]["certified"]) == (7, 6)
        assert result.bits == {step: plain.bits[step] for step in (5, 6, 7)}


BY_EPOCHS = (("eval_strategy", "steps"), ("eval_steps", 3), ("save_strategy", "epoch"))
"""An epoch has four steps, on two ranks with batches of this size."""


@slow
def test_evaluation_and_checkpoints_after_epochs_change_nothing_and_a_killed_job_goes_on(tmp_path: Path):
    trial = Trial(steps=10, settings=(*BY_EPOCHS, ("per_device_train_batch_size", 4)))
    alone = run_ranks(train, 2, replace(trial, folder=tmp_path / "alone"), None, timeout=120)
    trial = replace(trial, folder=tmp_path / "out")
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, 2, replace(trial, killed=7), tmp_path / "first", timeout=120)
    trusted = trusted_checkpoint(tmp_path / "out")
    assert trusted == str(tmp_path / "out" / "checkpoint-4")
    again = run_ranks(train, 2, replace(trial, resumed=trusted), tmp_path / "second", timeout=120)
    for plain, result in zip(alone, again, strict=True):
        assert (result.resumed, result.failures, result.found, result.unchecked) == (4, [], [], {})
        assert (result.status["step"], result.status["replay"]["certified"]) == (10, 10)
        assert result.bits == {step: plain.bits[step] for step in range(5, 11)}
    assert trusted_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-10")


@slow
@pytest.mark.parametrize("evaluated", ["steps", "epoch"])
def test_a_long_evaluation_or_write_is_no_hang(three: LiveRanks, evaluated: str, tmp_path: Path):
    settings = (*BY_EPOCHS, ("eval_strategy", evaluated), ("per_device_train_batch_size", 4))
    observer = replace(QUICK, checkpoint_write_seconds=60.0)
    trial = Trial(replay=None, observer=observer, settings=settings, folder=tmp_path / "out", writing=STALL)
    results = three.ask((trial, tmp_path / "run"), 120)
    assert [each.found for each in results] == [[]] * 3, results[0].incidents
    assert [*(tmp_path / "out").glob("checkpoint-*")]


def test_no_checkpoint_after_a_wrong_number_is_trusted(three: LiveRanks, tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=0, at="model.layers.0.mlp.up_proj/weight", step=3, bit=20)
    trial = Trial(faults=faults, folder=tmp_path / "out")
    results = three.ask((trial, tmp_path / "run"), 120)
    assert results[0].fired == 1
    assert ("sdc", "rank", (0,), 3) in results[0].found
    assert (tmp_path / "out" / "checkpoint-6").is_dir()
    assert trusted_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")


def test_an_uncertified_checkpoint_is_not_trusted(three: LiveRanks, tmp_path: Path):
    trial = Trial(folder=tmp_path / "out", replay=ReplayConfig(interval=5))
    three.ask((trial, tmp_path / "run"), 120)
    assert {each.name for each in (tmp_path / "out").glob("*-*")} == {f"checkpoint-{n}" for n in (2, 4, 6)}
    assert trusted_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-4")
    assert trusted_checkpoint(tmp_path) is None


def test_a_killed_loop_with_accelerate_goes_on_bitwise_from_memory(tmp_path: Path):
    trial = Trial("loop", steps=7)
    alone = run_ranks(train, 2, trial, None, timeout=120)
    trial = replace(trial, folder=tmp_path / "kept")
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(train, 2, replace(trial, killed=6), tmp_path / "first", timeout=120)
    again = run_ranks(train, 2, trial, tmp_path / "second", timeout=120)
    for plain, result in zip(alone, again, strict=True):
        assert (result.failures, result.found) == ([], [])
        assert result.resumed in (4, 5)  # what is due after a step is captured when the next one begins
        assert result.bits == {step: plain.bits[step] for step in range(result.resumed + 1, 8)}


ENGINES = {
    "accelerate, zero-0": (deepspeed_jobs.Plan(0, "accelerated"), weight("stack.0.up", 1)),
    "accelerate, zero-2": (deepspeed_jobs.Plan(2, "accelerated", bf16=True), weight("stack.0.up", 1)),
    "accelerate, zero-3": (
        deepspeed_jobs.Plan(3, "accelerated", zero=SOME_SMALL),
        miscalculated("stack.1/output", 1),
    ),
}


@slow
@pytest.mark.parametrize(("plan", "faults"), each_of(ENGINES))
def test_deepspeed_under_accelerate_is_bitwise_the_same_and_goes_on(
    plan: deepspeed_jobs.Plan, faults: FaultPlan, tmp_path: Path
):
    kept = replace(plan, directory=tmp_path / "kept")
    with LiveRanks(deepspeed_jobs.answering, 4) as ranks:
        alone = ranks.ask(plan, 120)
        with pytest.raises(RankError, match="exit code -9"):
            run_ranks(deepspeed_jobs.train, 4, replace(kept, killed=5, run_dir=tmp_path / "1"), timeout=120)
        again = ranks.ask(replace(kept, run_dir=tmp_path / "2"), 120)
        checked = ranks.ask(replace(plan, run_dir=tmp_path / "3"), 120)
        wrong = ranks.ask(replace(plan, steps=2, faults=faults, run_dir=tmp_path / "4"), 120)
    for plain, found, result in zip(alone, again, checked, strict=True):
        assert len(plain.bits) == 6
        assert result.bits == plain.bits
        assert (result.failures, result.named, result.unchecked) == ([], [], {})
        assert {"stack.0/output", "stack.1/output", "optimizer/reproduced"} <= result.agreed
        assert (result.status["step"], result.status["replay"]["checks"]) == (6, 6)
        assert found.resumed.step == 4
        assert found.bits == {step: plain.bits[step] for step in (5, 6)}
    assert wrong[0].named == [("sdc", "rank", (1,), 2)], wrong[0].incidents


def test_checkpoints_in_memory_are_refused_with_what_to_do_instead(tmp_path: Path):
    with pytest.raises(ValueError, match="resume_from_checkpoint=trusted_checkpoint"):
        ResiliencyCallback(object(), checkpoint=CheckpointConfig(tmp_path))


@slow
def test_the_example_trains_and_goes_on_from_what_can_be_trusted(tmp_path: Path):
    script = EXAMPLES / "frameworks" / "huggingface_trainer.py"
    assert script.read_text().count("\n") < 60
    losses: list[float] = []
    for steps in (20, 10):
        for newest in (15, 20):
            shutil.rmtree(tmp_path / "counting" / f"checkpoint-{newest}", ignore_errors=True)
        printed = torchrun(3, [script], tmp_path)
        assert "found: nothing" in printed
        reported = [float(each) for each in re.findall(r"'loss': '([\d.]+)'", printed)]
        assert len(reported) == steps // 5
        losses += reported
    # The steps that were trained twice are the same both times.
    assert losses[2:4] == losses[4:]
    assert losses[3] < losses[0]
    marked = sorted(each.parent.name for each in tmp_path.glob("counting/*/torchscout.json"))
    assert marked == [f"checkpoint-{step}" for step in (10, 15, 20, 5)]
