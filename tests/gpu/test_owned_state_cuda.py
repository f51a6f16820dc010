"""Over NCCL: state with one owner is watched at every step; hidden collectives are left alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compiled_jobs import STEPS, WAYS, compiled_job, with_and_without
from tests.support.hidden_collectives import HIDING, hiding_training
from tests.support.ranks import LiveRanks, run_ranks
from tests.support.replay_jobs import differing
from tests.support.resting_jobs import Resting, resting
from torchscout.config import ReplayConfig
from torchscout.decision.records.record import Scope
from torchscout.faults.plan import FaultPlan

pytestmark = [pytest.mark.gpu, pytest.mark.nccl(4)]


@pytest.fixture(scope="module")
def watched() -> Iterator[LiveRanks]:
    with LiveRanks(resting, 4, backend="nccl") as ranks:
        yield ranks


@pytest.mark.parametrize("layout", ["fsdp2", "tensor"])
@pytest.mark.parametrize(("step", "what"), [(12, "weight"), (10, "weight"), (13, "exp_avg")])
def test_a_flip_between_two_checks_names_its_rank_and_is_not_certified(
    watched: LiveRanks, layout: str, step: int, what: str, tmp_path: Path
):
    found = watched.ask(Resting(tmp_path, layout, flip=(2, step, what)), 90)
    assert [each.fired for each in found] == [0, 0, 1, 0]
    (incident,) = found[0].incidents
    assert (incident.scope, incident.ranks, incident.step) == (Scope.RANK, (2,), 15)
    assert incident.records[0].surface == "state/owned"
    for each in found:
        assert each.failures == []
        # After step 10 the flip may have come before what was captured then was copied.
        assert each.replay["certified"] == (5 if step == 10 else 10)


@pytest.mark.parametrize("layout", ["fsdp2", "tensor"])
def test_unchanged_state_is_certified(watched: LiveRanks, layout: str, tmp_path: Path):
    for each in watched.ask(Resting(tmp_path, layout), 90):
        assert (each.incidents, each.failures, each.replay["held_up"]) == ([], [], {})
        assert (each.replay["certified"], each.replay["watched"]) == (20, 1.0)


@pytest.mark.parametrize("clipped", ["counted", "data"])
def test_what_training_writes_between_updates_names_nobody(watched: LiveRanks, clipped: str, tmp_path: Path):
    config = ReplayConfig(interval=5, watched=0.5)
    for each in watched.ask(Resting(tmp_path, clipped=clipped, replay=config), 90):
        assert (each.incidents, each.failures, each.replay["certified"]) == ([], [], 20)


@pytest.fixture(scope="module")
def hiding() -> Iterator[LiveRanks]:
    with LiveRanks(hiding_training, 3, backend="nccl") as ranks:
        yield ranks


@pytest.mark.parametrize("place", HIDING)
def test_training_with_hidden_collectives_is_left_as_it_is(hiding: LiveRanks, place: str, tmp_path: Path):
    config = ReplayConfig(
        interval=3, recipes=("replicated_state", "embedding", "layer", "output", "optimizer")
    )
    plain = hiding.ask((place, 10, None, tmp_path / "plain"), 90)
    seen = hiding.ask((place, 10, config, tmp_path / "seen"), 90)
    for alone, with_scout in zip(plain, seen, strict=True):
        assert with_scout.collectives == alone.collectives
        assert with_scout.bits == alone.bits
        assert (with_scout.incidents, with_scout.failures) == ([], [])
        assert with_scout.certified is not None
        reasons = [each for each in with_scout.not_checked.values() if "must not repeat" in each]
        assert reasons, with_scout.not_checked


def steadily(rank: int, body: Callable[..., Any], *args: Any) -> Any:
    """With kernels that repeat, so that two trainings can be compared at all."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    return body(rank, *args)


COMPILED = ("inside DDP", "around DDP", "with graph breaks", "with dynamic shapes")


@pytest.mark.parametrize("name", COMPILED)
def test_a_model_compiled_by_inductor_is_certified_and_trains_bitwise_the_same(name: str, tmp_path: Path):
    given = (with_and_without, WAYS[name], tmp_path, "inductor")
    trained = run_ranks(steadily, 3, *given, timeout=200, backend="nccl")
    for found, _, weights in trained:
        assert (found.incidents, found.failures) == ([], [])
        assert found.status["not_checked"] == {}
        assert found.status["certified"] == STEPS
        assert found.weights == weights


def test_a_wrong_layer_of_a_compiled_model_names_its_rank(tmp_path: Path):
    faults = FaultPlan().flip_bit(rank=2, at="stack.1/output", step=2, bit=20, index=3, calls=None)
    for found in run_ranks(
        compiled_job, 3, WAYS["inside DDP"], faults, tmp_path, "inductor", timeout=200, backend="nccl"
    ):
        assert (found.failures, found.unfired) == ([], 0)
        (incident,) = found.incidents
        assert (incident.scope, incident.ranks, incident.step) == (Scope.RANK, (2,), 2), incident.sentence
        assert differing(found.records)["stack.1/output"] == (2,)
