"""What faults do to tensors: exactly the bits and elements they say."""

from __future__ import annotations

import pickle
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
    assert SetValue(5.0, index=1).corrupt(tensor) == "element 1: 1.0 -> 5.0"
    assert Scale(2.0).corrupt(tensor) == "all 3 elements times 2.0"
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


def test_several_bits_of_one_element_flip():
    assert changed(FlipBits((0, 7, 31), index=5), torch.randn(4, 4).t()) == {5: 1 | 1 << 7 | 1 << 31}


def test_periodic_addresses_are_hit_and_no_others():
    assert changed(FlipBits((3,), index=7, every=5), torch.randn(16)) == {7: 8, 12: 8}
    assert changed(FlipBits((3,), index=2, every=5), torch.randn(4, 4).t()) == {2: 8, 7: 8, 12: 8}


@pytest.mark.parametrize("bit", [0, 22, 31])
@pytest.mark.parametrize("value", [0, 1])
def test_a_stuck_bit_is_set_and_all_other_bits_are_unchanged(bit: int, value: int):
    tensor = torch.randn(32, generator=torch.Generator().manual_seed(3))
    before = bits_of(tensor)
    for index in range(32):
        is_already = (before[index] >> bit) & 1 == value
        assert (StuckBit(bit, value, index).corrupt(tensor) is None) is is_already
        assert (bits_of(tensor)[index] >> bit) & 1 == value
    assert [(old ^ new) & ~(1 << bit) for old, new in zip(before, bits_of(tensor), strict=True)] == [0] * 32


def test_a_stuck_address_line_hits_every_nth():
    tensor = torch.ones(8)
    message = StuckBit(31, 1, index=1, every=4).corrupt(tensor)
    assert message == "bit 31 stuck at 1 in every 4th element from 1, 2 in all"
    assert tensor.tolist() == [1, -1, 1, 1, 1, -1, 1, 1]


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
    assert Overwrite(1, 3, value=7).corrupt(tensor) == "elements 1 to 3 overwritten"
    assert tensor.tolist() == [0, 7, 7, 7, 4, 5]
    assert Overwrite(1, 3, value=7).corrupt(tensor) is None


def test_corrupting_a_view_changes_the_underlying_storage():
    storage = torch.ones(6)
    FlipBits((31,), every=2).corrupt(storage[1:5])
    assert storage.tolist() == [1, -1, 1, -1, 1, 1]


def test_effects_can_be_pickled():
    for effect in (FlipBits((1, 2), 3), StuckBit(1, 0), Overwrite(1, 2, 3), SetValue(2.0), Scale(3.0)):
        assert pickle.loads(pickle.dumps(effect)) == effect


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda: FlipBit(32).corrupt(torch.ones(1)), r"float32 has bits 0 to 31, got 32"),
        (lambda: FlipBits((3, 40)).corrupt(torch.ones(1)), r"float32 has bits 0 to 31, got 40"),
        (lambda: StuckBit(8, 1).corrupt(torch.ones(1, dtype=torch.int8)), "int8 has bits 0 to 7, got 8"),
        (lambda: FlipBit(0, index=4).corrupt(torch.ones(4)), "no element 4 in a tensor of 4"),
        (lambda: Overwrite(2, 3).corrupt(torch.ones(4)), "no elements 2 to 4 in a tensor of 4"),
        (
            lambda: FlipBit(0).corrupt(torch.ones(2, dtype=torch.complex128)),
            "cannot flip a bit of torch.complex128",
        ),
    ],
)
def test_corrupting_missing_bits_or_elements_is_refused(corrupt, message: str):
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


def test_empty_steps_or_places_are_refused():
    with pytest.raises(ValueError, match="needs steps, ranks and places"):
        realistic(1, steps=[], ranks=[0], places=PLACES)
    with pytest.raises(ValueError, match="has no elements"):
        realistic(1, steps=[1], ranks=[0], places={"layer.0/weight": 0})
