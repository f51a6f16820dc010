"""What faults do to tensors: exactly the bits and elements they say."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.unit.test_faults import Block, train
from torchscout.faults.effects import FlipBit, FlipBits, Overwrite, Scale, SetValue, StuckBit, TensorEffect
from torchscout.faults.plan import realistic

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_every_bit_flips_and_flips_back(dtype: torch.dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype).t()  # not contiguous
    original = tensor.contiguous().view(torch.uint8).clone()
    for bit in range(8 * tensor.element_size()):
        FlipBit(bit, index=7).corrupt(tensor)
        changed = tensor.contiguous().view(torch.uint8) ^ original
        assert changed.count_nonzero() == 1
        position = changed.flatten().nonzero().item()
        assert position == 7 * tensor.element_size() + bit // 8
        assert changed.flatten()[position] == 1 << (bit % 8)
        FlipBit(bit, index=7).corrupt(tensor)
    assert torch.equal(tensor.contiguous().view(torch.uint8), original)


def test_autograd_does_not_notice():
    tensor = torch.ones(3, requires_grad=True)
    version = tensor._version
    SetValue(5.0, index=1).corrupt(tensor)
    Scale(2.0).corrupt(tensor)
    assert tensor.tolist() == [2.0, 10.0, 2.0]
    assert tensor._version == version


def bits_of(tensor: torch.Tensor) -> list[int]:
    return [bits & 0xFFFFFFFF for bits in tensor.contiguous().view(torch.int32).flatten().tolist()]


def changed(effect, tensor: torch.Tensor) -> dict[int, int]:
    """Which bits of which elements an effect changed."""
    before = bits_of(tensor)
    assert effect.corrupt(tensor)
    pairs = enumerate(zip(before, bits_of(tensor), strict=True))
    return {index: old ^ new for index, (old, new) in pairs if old != new}


@pytest.mark.parametrize(
    ("effect", "tensor", "bits"),
    [
        (FlipBits((0, 7, 31), index=5), torch.ones(4, 4).t(), {5: 1 | 1 << 7 | 1 << 31}),
        (FlipBits((3,), index=7, every=5), torch.ones(16), {7: 8, 12: 8}),
        (FlipBits((3,), index=2, every=5), torch.ones(4, 4).t(), {2: 8, 7: 8, 12: 8}),
        (FlipBits((31,), every=2), torch.ones(6)[1:5], {0: 1 << 31, 2: 1 << 31}),
        (StuckBit(31, 1, index=1, every=4), torch.ones(8), {1: 1 << 31, 5: 1 << 31}),
        (StuckBit(29, 0, index=1), torch.ones(8), {1: 1 << 29}),
    ],
)
def test_the_planned_bits_change_and_no_others(effect: TensorEffect, tensor: torch.Tensor, bits: dict):
    assert changed(effect, tensor) == bits


def test_a_bit_that_is_stuck_at_its_value_changes_nothing():
    assert StuckBit(31, 0).corrupt(torch.ones(1)) is None


def test_a_range_becomes_noise_of_the_same_size_and_the_same_from_the_same_seed():
    def overwritten(seed: int) -> torch.Tensor:
        tensor = torch.arange(40, dtype=torch.float32).reshape(5, 8).t()
        assert set(changed(Overwrite(10, 6, seed), tensor)) == set(range(10, 16))
        return tensor.contiguous()

    first = overwritten(1)
    assert torch.equal(first, overwritten(1))
    assert not torch.equal(first, overwritten(2))
    assert first.isfinite().all()
    assert first.abs().max() < 5 * 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_a_range_of_any_type_becomes_one_value(dtype: torch.dtype):
    tensor = torch.arange(6).to(dtype)
    assert Overwrite(1, 3, value=7).corrupt(tensor)
    assert tensor.tolist() == [0, 7, 7, 7, 4, 5]
    assert Overwrite(1, 3, value=7).corrupt(tensor) is None


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda: FlipBits((3, 40)).corrupt(torch.ones(1)), "got 40"),
        (lambda: StuckBit(8, 1).corrupt(torch.ones(1, dtype=torch.int8)), "got 8"),
        (lambda: Overwrite(2, 3).corrupt(torch.ones(4)), "2 to 4"),
        (lambda: FlipBit(0).corrupt(torch.ones(2, dtype=torch.complex128)), "complex128"),
        (lambda: realistic(1, steps=[], ranks=[0], places=PLACES), "needs steps"),
        (lambda: realistic(1, steps=[1], ranks=[0], places={"layer.0/weight": 0}), "no elements"),
    ],
)
def test_what_is_not_there_cannot_be_corrupted(corrupt, message: str):
    with pytest.raises(ValueError, match=message):
        corrupt()


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
