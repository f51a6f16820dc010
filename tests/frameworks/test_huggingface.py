"""Hugging Face's own Trainer with our callback: its checkpoints, and which of them can be trusted."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.jobs.contracts import Attempt, Ranks
from evaluation.jobs.job import Trial as JobTrial
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


@pytest.fixture(scope="module")
def three() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 3) as ranks:
        yield ranks


@pytest.mark.long
def test_a_cache_in_training_is_reported(tmp_path: Path):
    trial = JobTrial(steps=4, interval=1, run_dir=tmp_path / "run", keeps_records=True)
    with Ranks(Attempt("huggingface-cached", tmp_path, tmp_path)) as ranks:
        for report in ranks.train(trial).reports:
            reasons = [why for name, why in report.unchecked.items() if name.startswith("model.layers")]
            assert reasons
            assert all("use_cache=False" in str(why) for why in reasons), reasons


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
