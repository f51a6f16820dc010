"""Layers of a model that is compiled as a whole: wrong ones are named, and nothing is compiled again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.compiled_jobs import STEPS, WAYS, Way, compiled_job, frames_compiled, with_and_without
from tests.support.ranks import run_ranks
from tests.support.replay_jobs import differing
from torchscout.decision.records.record import Action, Manifestation, Scope
from torchscout.faults.plan import FaultPlan

RARE = ("around DDP", "DDP in place", "blocks too", "in one piece", "with static shapes that change")
"""Ways to compile that differ little from others: tried with the slow tests."""
TARGETS = ("tokens", "stack.0", "stack.1", "head")


def every(*names: str) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.slow if each in RARE else ()) for each in names]


def flipped(rank: int, at: str, step: int) -> FaultPlan:
    """In every eager call of a step: those of the pass and of all replays."""
    return FaultPlan().flip_bit(rank=rank, at=at, step=step, bit=20, index=3, calls=None)


@pytest.mark.slow_cases(
    "around DDP, with a buffer", "forward alone", "in place", "inside DDP", "with dynamic shapes"
)
@pytest.mark.long_cases("with graph breaks")
@pytest.mark.parametrize("name", every(*WAYS))
def test_a_clean_job_is_certified_and_trains_bitwise_the_same(name: str, tmp_path: Path):
    for result, compilations, weights in run_ranks(with_and_without, 3, WAYS[name], tmp_path, timeout=240):
        assert (result.incidents, result.failures) == ([], [])
        assert result.status["not_checked"] == {}
        assert result.status["certified"] == STEPS
        agreeing = {each.surface for each in result.records if each.status == "agree"}
        for target in TARGETS:
            assert f"{target}/output" in agreeing
            weight = {"tokens": "tokens/weight", "head": "head/weight"}.get(target, f"{target}.up/weight")
            assert f"{weight}.grad" in agreeing, "gradients are compared too"
        assert result.weights == weights
        assert result.compilations == compilations, "nothing was compiled for replays"
        assert result.passes == 1, "one whole-model pass saves the input of every target"


@pytest.mark.slow_cases("in place", "inside DDP")
@pytest.mark.long_cases("forward alone")
@pytest.mark.parametrize("name", every("inside DDP", "around DDP", "in place", "forward alone"))
def test_a_wrong_output_of_a_layer_names_its_rank(name: str, tmp_path: Path):
    for result in run_ranks(
        compiled_job, 3, WAYS[name], flipped(2, "stack.1/output", 2), tmp_path, timeout=240
    ):
        assert (result.failures, result.unfired) == ([], 0)
        (incident,) = result.incidents
        assert (incident.manifestation, incident.scope) == (Manifestation.SDC, Scope.RANK)
        assert (incident.ranks, incident.step) == ((2,), 2), incident.sentence
        assert "stack.1/output" in incident.sentence
        assert "the weights agree, only the computation differs" in incident.sentence
        named = differing(result.records)
        assert named["stack.1/output"] == (2,)
        assert not [surface for surface in named if not surface.startswith("stack.1")], named
        assert result.status["certified"] == 1


@pytest.mark.slow_cases("head/output", "stack.0/grad_input", "tokens/output")
@pytest.mark.parametrize("at", ["tokens/output", "head/output", "stack.0/grad_input"])
def test_wrong_numbers_of_other_parts_name_their_rank(at: str, tmp_path: Path):
    for result in run_ranks(compiled_job, 3, WAYS["inside DDP"], flipped(1, at, 1), tmp_path, timeout=240):
        assert (result.failures, result.unfired) == ([], 0)
        (incident,) = result.incidents
        assert (incident.scope, incident.ranks, incident.step) == (Scope.RANK, (1,), 1), incident.sentence
        assert {surface.rpartition("/")[0] for surface in differing(result.records)} == {at.partition("/")[0]}


def test_of_two_ranks_nobody_is_named(tmp_path: Path):
    faults = flipped(1, "stack.1/output", 2)
    for result in run_ranks(compiled_job, 2, WAYS["inside DDP"], faults, tmp_path, timeout=240):
        assert (result.failures, result.unfired) == ([], 0)
        (incident,) = result.incidents
        assert (incident.scope, incident.ranks) == (Scope.PEER_GROUP, (0, 1))
        assert incident.action is Action.INSPECT
        of_layer = [each for each in result.records if each.surface == "stack.1/output"]
        assert {each.status for each in of_layer if each.step == 2} == {"inconclusive"}
        assert {each.status for each in of_layer if each.step != 2} == {"agree"}


@pytest.mark.slow_cases("around DDP, with a buffer")
@pytest.mark.long_cases("inside DDP")
@pytest.mark.parametrize("name", ["inside DDP", "around DDP, with a buffer"])
def test_torchscouts_own_code_is_not_compiled(name: str, tmp_path: Path):
    for (without, attached), warned in run_ranks(frames_compiled, 2, WAYS[name], tmp_path, timeout=240):
        assert attached == without > 0
        assert warned == []


@pytest.mark.slow
@pytest.mark.parametrize("way", [Way(), Way(options={"dynamic": True}, lengths=(8, 8, 5, 8, 11))])
def test_with_inductor_training_is_bitwise_the_same_and_a_wrong_layer_is_named(way: Way, tmp_path: Path):
    found = run_ranks(with_and_without, 3, way, tmp_path / "clean", "inductor", timeout=500)
    for result, _, weights in found:
        assert (result.incidents, result.failures, result.status["certified"]) == ([], [], STEPS)
        assert (result.weights, result.passes) == (weights, 1)
    faults = flipped(2, "stack.1/output", 2)
    for result in run_ranks(compiled_job, 3, way, faults, tmp_path / "faulty", "inductor", timeout=500):
        (incident,) = result.incidents
        assert (incident.scope, incident.ranks, result.unfired) == (Scope.RANK, (2,), 0)
