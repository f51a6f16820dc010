"""TorchTitan's own trainer over NCCL, with FSDP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.jobs.job import Trial
from evaluation.jobs.titan import Setup
from tests.support.nccl_ranks import (
    FAULTY_STEP,
    STEPS,
    UNEVEN,
    NcclRanks,
    has_named,
    is_silent,
    needs,
    started,
    went_on,
)
from tests.support.ranks import RankError, run_ranks
from tests.support.titan_jobs import Question, answer, answering
from torchscout.faults.plan import FaultPlan

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(3), needs("torchtitan")]
LAYERS = ("layers.0", "layers.1")
either = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])


def question(run_dir: Path | None, graphs: bool = False, **changes: object) -> Question:
    """``interval`` is 1 unless said."""
    uneven = {"straggler": UNEVEN.straggler, "baseline": UNEVEN.baseline}
    trial = Trial(steps=STEPS, interval=1, run_dir=run_dir, replay=uneven, keeps_records=True)
    return Question(Setup(graphs=graphs), replace(trial, **changes))


@pytest.fixture(scope="module")
def three() -> Iterator[NcclRanks]:
    with started(answering, 3) as ranks:
        yield ranks


@pytest.mark.parametrize("steps", [STEPS, pytest.param(500, marks=pytest.mark.slow)])
@either
def test_a_healthy_job_is_silent_certified_and_bitwise_the_same(
    three: NcclRanks, graphs: bool, steps: int, tmp_path: Path
):
    checked = three.ask(question(tmp_path, graphs, steps=steps, interval=2), 400)
    for seen in checked:
        is_silent(seen, LAYERS, steps)
    alone = three.ask(question(None, graphs, steps=steps), 400)
    assert [each.bits for each in checked] == [each.bits for each in alone]


def test_a_flipped_bit_in_what_one_rank_alone_updates_names_that_rank(three: NcclRanks, tmp_path: Path):
    results = three.ask(replace(question(tmp_path, steps=4), spoiled=(1, 2, 0)))
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
    results = three.ask(question(tmp_path, graphs, steps=step + 1, faults=faults))
    incident = has_named(results, 2, "sdc")
    assert place in {each.surface for each in incident.records}


@either
def test_a_slow_layer_names_its_rank(three: NcclRanks, graphs: bool, tmp_path: Path):
    results = three.ask(question(tmp_path, graphs, slow=(1, range(4, STEPS + 1))))
    assert [bool(each.fired) for each in results] == [False, True, False]
    named = {(each.manifestation.value, each.ranks) for each in results[0].incidents}
    assert named == {("straggler", (1,))}, results[0].incidents


@either
def test_a_rank_that_sleeps_is_named_and_training_goes_on(three: NcclRanks, graphs: bool, tmp_path: Path):
    changes = {"interval": 100, "sleep": (1, FAULTY_STEP), "min_silence_seconds": 2.0}
    results = three.ask(question(tmp_path, graphs, **changes))
    found = [(each.manifestation.value, each.scope.value, each.ranks) for each in results[0].incidents]
    assert found == [("hang", "rank", (1,))], results[0].incidents
    went_on(results, tmp_path)


@either
def test_a_killed_job_resumes_bitwise(three: NcclRanks, graphs: bool, alone: dict[str, str], tmp_path: Path):
    killed = question(tmp_path / "run", graphs, checkpoints=tmp_path / "kept", end=FAULTY_STEP)
    with pytest.raises(RankError):
        run_ranks(answer, 3, killed, timeout=180, backend="nccl", environment=alone)
    resumed = three.ask(replace(killed, trial=replace(killed.trial, end=None)))
    for plain, seen in zip(three.ask(question(None, graphs)), resumed, strict=True):
        assert (seen.failures, seen.incidents) == ([], [])
        assert 0 < seen.status["replay"]["checks"] <= STEPS - FAULTY_STEP + 3
        assert seen.bits == {step: plain.bits[step] for step in seen.bits}
        assert 0 < seen.resumed < FAULTY_STEP
