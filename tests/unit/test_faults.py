"""Faults happen where, when and as often as planned, and nowhere else."""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from torchscout.faults.fault import Faults
from torchscout.faults.injector import Injector
from torchscout.faults.tensor_effects import FlipBit, Scale, SetValue


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


def train(faults: Faults, steps: int = 3, rank: int = 0, log: Path | None = None):
    """Train; return the injector and, for every step, all parameters after it."""
    torch.manual_seed(0)
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters())
    history = []
    with Injector(faults, rank, model, optimizer, log=log) as injector:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            history.append({name: value.detach().clone() for name, value in model.named_parameters()})
    assert not model.layer[2]._forward_hooks
    assert not optimizer._optimizer_step_post_hooks
    return injector, history


def differing(history, clean, step: int) -> list[str]:
    return [name for name in clean[step] if not torch.equal(history[step][name], clean[step][name])]


def test_a_bit_of_a_weight_flips_after_the_step_it_was_planned_for():
    injector, history = train(Faults().flip_bit(rank=0, at="layer.2/weight", step=2, bit=30, index=5))
    _, clean = train(Faults())
    assert differing(history, clean, 0) == []
    assert differing(history, clean, 1) == ["layer.2.weight"]
    before, after = clean[1]["layer.2.weight"].flatten(), history[1]["layer.2.weight"].flatten()
    assert (before != after).nonzero().tolist() == [[5]]
    assert bits(before[5]) ^ bits(after[5]) == 1 << 30
    (firing,) = injector.fired
    assert (firing.rank, firing.at, firing.step) == (0, "layer.2/weight", 2)
    assert str(before[5].item()) in firing.detail
    assert injector.unfired == []


def bits(value: torch.Tensor) -> int:
    return struct.unpack("<I", struct.pack("<f", value.item()))[0]


@pytest.mark.parametrize(
    "what", ["input", "output", "grad_output", "grad_input", "weight.grad", "weight.exp_avg"]
)
def test_every_place_can_be_reached(what: str):
    injector, history = train(Faults().scale(rank=0, at=f"layer.1/{what}", step=2, factor=-3.0))
    _, clean = train(Faults())
    assert [(firing.at, firing.step) for firing in injector.fired] == [(f"layer.1/{what}", 2)]
    assert differing(history, clean, 0) == []
    assert differing(history, clean, 2) != []


def test_another_ranks_faults_do_nothing():
    plan = Faults().flip_bit(rank=1, at="layer.0/weight", step=1, bit=3)
    injector, history = train(plan)
    _, clean = train(Faults())
    assert injector.fired == injector.unfired == []
    assert differing(history, clean, 2) == []


def test_a_range_of_steps_fires_once_in_each():
    injector, _ = train(
        Faults().delay(rank=0, at="layer.0/backward", step=range(2, 4), seconds=0.01), steps=4
    )
    assert [firing.step for firing in injector.fired] == [2, 3]


def test_a_module_called_twice_in_a_step_fires_once():
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    faults = Faults().set_value(rank=0, at="layer.0/output", step=1, value=float("nan"))
    with Injector(faults, 0, model, optimizer) as injector:
        first, second = model(torch.ones(1, 4)), model(torch.ones(1, 4))
    assert len(injector.fired) == 1
    assert first.isnan().any()
    assert not second.isnan().any()


def test_two_faults_at_one_place_both_fire():
    plan = Faults().flip_bit(rank=0, at="layer.0/bias", step=1, bit=1)
    injector, _ = train(plan.flip_bit(rank=0, at="layer.0/bias", step=1, bit=2))
    assert len(injector.fired) == 2


def test_what_never_happened_is_told():
    injector, _ = train(Faults().delay(rank=0, at="step", step=9, seconds=1.0))
    assert [fault.steps for fault in injector.unfired] == [range(9, 10)]


def test_delays_take_time():
    start = time.monotonic()
    train(Faults().delay(rank=0, at="layer.0/forward", step=1, seconds=0.3))
    assert time.monotonic() - start >= 0.3


def test_a_killed_process_is_still_seen_to_have_been_killed(tmp_path: Path):
    log = tmp_path / "fired.jsonl"
    pid = os.spawnv(os.P_NOWAIT, os.sys.executable, [os.sys.executable, "-c", KILLED, str(log)])
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert json.loads(log.read_text())["step"] == 2


KILLED = """
import signal, sys, pathlib
from tests.unit.test_faults import train
from torchscout.faults.fault import Faults
train(Faults().signal(rank=0, step=2, number=signal.SIGKILL), log=pathlib.Path(sys.argv[1]))
"""


def test_a_plan_travels():
    plan = Faults().flip_bit(rank=5, at="layer.2/weight", step=7, bit=30).showing("layer.2/output")
    assert pickle.loads(pickle.dumps(plan)) == plan


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


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (lambda: FlipBit(32).corrupt(torch.ones(1)), r"float32 has bits 0 to 31, got 32"),
        (lambda: FlipBit(0, index=4).corrupt(torch.ones(4)), "element 4 of a tensor of 4"),
        (
            lambda: FlipBit(0).corrupt(torch.ones(2, dtype=torch.complex128)),
            "cannot flip a bit of torch.complex128",
        ),
        (lambda: Faults().delay(rank=-1, at="step", step=1, seconds=1), "negative, got -1"),
        (lambda: Faults().delay(rank=0, at="step", step=0, seconds=1), "counted from 1"),
        (
            lambda: train(Faults().delay(rank=0, at="layer.3/output", step=1, seconds=1)),
            "no module 'layer.3'",
        ),
        (lambda: train(Faults().scale(rank=0, at="layer.1/weights", step=1, factor=1)), "'layer.1.weight'"),
    ],
)
def test_bad_plans_are_refused(plan, told: str):
    with pytest.raises(ValueError, match=told):
        plan()
