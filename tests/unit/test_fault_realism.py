"""Drawn corruptions look like those in the field, and are the same wherever they are drawn."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.unit.test_faults import Block, train
from torchscout.faults.effects import FlipBit, FlipBits, TensorEffect
from torchscout.faults.plan import realistic

PLACES = {"layer.0/weight": 16, "layer.1/output": 8, "layer.2/bias.exp_avg": 4}


def drawn(seed: int, count: int = 4000):
    return realistic(seed, steps=range(1, count + 1), ranks=range(8), places=PLACES)


def test_single_bits_are_under_forty_percent_of_the_bit_flips():
    effects = [fault.effect for fault in drawn(1)]
    flips = [each for each in effects if isinstance(each, FlipBit | FlipBits)]
    single = [each for each in flips if isinstance(each, FlipBit)]
    assert 0.25 < len(single) / len(flips) < 0.4
    assert len({type(each) for each in effects}) == 5  # two kinds of flips, stuck bits, ranges, values


def test_about_one_outcome_in_a_hundred_is_not_finite():
    outcomes: Counter[str] = Counter()
    for step, fault in enumerate(drawn(2)):
        tensor = torch.randn(PLACES[fault.at], generator=torch.Generator().manual_seed(step))
        assert isinstance(fault.effect, TensorEffect)
        fault.effect.corrupt(tensor)
        outcomes["all"] += 1
        outcomes["not finite"] += not tensor.isfinite().all()
    assert 0.005 < outcomes["not finite"] / outcomes["all"] < 0.025


def test_faults_depend_on_the_seed_alone():
    assert drawn(3, 50) == drawn(3, 50)
    assert drawn(3, 50) != drawn(4, 50)
    plan = drawn(3, 400)
    assert {fault.rank for fault in plan} == set(range(8))
    assert {fault.at for fault in plan} == set(PLACES)
    assert [fault.steps[0] for fault in plan] == list(range(1, 401))


def test_every_drawn_fault_is_possible():
    plan = drawn(5, 300)
    plan.check(8, Block())
    injector, _ = train(plan, steps=60, rank=2)
    mine = [fault for fault in plan.of(2) if fault.steps[0] <= 60]
    assert len(injector.fired) + sum(injector.report()["masked"].values()) == len(mine)


def test_empty_steps_or_places_are_refused():
    with pytest.raises(ValueError, match="needs steps, ranks and places"):
        realistic(1, steps=[], ranks=[0], places=PLACES)
    with pytest.raises(ValueError, match="has no elements"):
        realistic(1, steps=[1], ranks=[0], places={"layer.0/weight": 0})
