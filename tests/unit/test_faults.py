"""Faults happen where, when and as often as planned, and nowhere else."""

from __future__ import annotations

import itertools
import json
import pickle
import signal
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from torchscout.faults.fault import Recurring, since
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.testing.local_ranks import start_process


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


def train(faults: FaultPlan, steps: int = 3, rank: int = 0, log: Path | None = None):
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
    injector, history = train(FaultPlan().flip_bit(rank=0, at="layer.2/weight", step=2, bit=30, index=5))
    _, clean = train(FaultPlan())
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
    injector, history = train(FaultPlan().scale(rank=0, at=f"layer.1/{what}", step=2, factor=-3.0))
    _, clean = train(FaultPlan())
    assert [(firing.at, firing.step) for firing in injector.fired] == [(f"layer.1/{what}", 2)]
    assert differing(history, clean, 0) == []
    assert differing(history, clean, 2) != []


FLIPPED = FaultPlan().flip_bit(rank=0, at="layer.0/bias", step=1, bit=1)


@pytest.mark.parametrize(
    ("plan", "fired", "unfired"),
    [
        (FaultPlan().delay(rank=0, at="layer.0/backward", step=range(2, 4), seconds=0.0), [2, 3], 0),
        (FaultPlan().scale(rank=0, at="layer.0/weight", step=since(2), factor=2.0), [2, 3, 4, 5], 0),
        (FLIPPED.flip_bit(rank=0, at="layer.0/bias", step=1, bit=2), [1, 1], 0),
        (FaultPlan().delay(rank=0, at="step", step=9, seconds=1.0), [], 1),
        (FaultPlan().delay(rank=1, at="step", step=2, seconds=60.0), [], 0),
    ],
    ids=["in a range", "from a step on", "two at one place", "later", "of another rank"],
)
def test_a_fault_fires_in_the_steps_of_its_rank(plan: FaultPlan, fired: list[int], unfired: int):
    injector, _ = train(plan, steps=5)
    assert [firing.step for firing in injector.fired] == fired
    assert len(injector.unfired) == unfired


def test_a_recurring_fault_happens_by_chance_and_alike_in_every_run_and_on_every_rank():
    when = Recurring(range(1, 1001), probability=0.3, seed=5)
    drawn = [step for step in range(1, 1200) if step in when]
    assert 250 < len(drawn) < 350
    assert max(drawn) <= 1000
    assert drawn != [step for step in range(1, 1200) if step in Recurring(range(1, 1001), 0.3, seed=6)]
    for rank in (0, 1):
        plan = FaultPlan().delay(rank=rank, at="step", step=when, seconds=0)
        injector, _ = train(plan, steps=12, rank=rank)
        assert [firing.step for firing in injector.fired] == [step for step in drawn if step <= 12]


def test_a_buffer_can_be_wrong():
    model = nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    faults = FaultPlan().set_value(rank=0, at="/running_mean", step=2, value=9.0, index=3)
    with Injector(faults, 0, model, optimizer) as injector:
        for _ in range(2):
            assert 9.0 not in model.running_mean
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
    assert model.running_mean[3] == 9.0
    assert len(injector.fired) == 1


def test_a_step_of_several_stages_begins_with_the_first_that_is_called():
    stages = nn.ModuleList([Block(), Block()])
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.1)
    faults = FaultPlan().set_value(rank=0, at="1.layer.0/output", step=2, value=9.0)
    wrong: list[bool] = []
    with Injector(faults, 0, stages, optimizer):
        stages[1].layer[0].register_forward_hook(lambda _, __, output: wrong.append(9.0 in output))
        for _ in range(3):
            stages[1](stages[0](torch.ones(2, 4))).sum().backward()
            optimizer.step()
    assert wrong == [False, True, False]


def test_a_fault_that_changes_nothing_has_not_fired():
    _, clean = train(FaultPlan())
    negative = {name: int((value.flatten() < 0).nonzero()[0]) for name, value in clean[0].items()}
    weight, bias = negative["layer.0.weight"], negative["layer.0.bias"]
    plan = FaultPlan().stick_bit(rank=0, at="layer.0/weight", step=since(1), bit=31, value=1, index=weight)
    plan = plan.stick_bit(rank=0, at="layer.0/bias", step=1, bit=31, value=0, index=bias)
    injector, history = train(plan)
    assert [firing.at for firing in injector.fired] == ["layer.0/bias"]
    assert [fault.at for fault in injector.unfired] == ["layer.0/weight"]
    assert injector.report()["masked"] == {"layer.0/weight": 3}
    assert injector.report()["unfired"] == ["layer.0/weight"]
    assert differing(history, clean, 0) == ["layer.0.bias"]


def test_phases_are_slow_in_the_step_they_belong_to():
    """A batch is fetched before the step it is for begins; a checkpoint is written after the one it is of."""
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    faults = FaultPlan().delay(rank=0, at="input", step=2, seconds=0.3)
    faults = faults.delay(rank=0, at="checkpoint_write", step=3, seconds=0.3)
    faults = faults.delay(rank=0, at="checkpoint_read", step=3, seconds=60)
    spent: dict[str, list[float]] = {"fetch": [], "write": []}
    with Injector(faults, 0, model, optimizer) as injector:
        batches = injector.input(torch.full((1, 4), float(value)) for value in range(4))
        for value in range(4):
            start = time.monotonic()
            batch = next(batches)
            spent["fetch"].append(time.monotonic() - start)
            assert torch.equal(batch, torch.full((1, 4), float(value)))
            model(batch).sum().backward()
            optimizer.step()
            start = time.monotonic()
            with injector.checkpoint_io("write"):
                pass
            spent["write"].append(time.monotonic() - start)
    assert [(firing.at, firing.step) for firing in injector.fired] == [("input", 2), ("checkpoint_write", 3)]
    assert spent["fetch"].index(max(spent["fetch"])) == 1
    assert spent["write"].index(max(spent["write"])) == 2
    assert [fault.at for fault in injector.unfired] == ["checkpoint_read"]


@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan().delay(rank=0, at="layer.0/forward", step=2, seconds=0.5),
        FaultPlan().freeze(rank=0, step=2, seconds=0.5),
        FaultPlan().hold_interpreter(rank=0, step=2, seconds=0.5),
    ],
    ids=["delayed", "frozen", "held"],
)
def test_a_late_rank_takes_its_time_and_trains_on(plan: FaultPlan, request: pytest.FixtureRequest):
    ticks: list[float] = []
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.wait(0.01):
            ticks.append(time.monotonic())

    threading.Thread(target=tick).start()
    start = time.monotonic()
    injector, history = train(plan)
    took = time.monotonic() - start
    is_over.set()
    assert len(injector.fired) == 1
    assert took >= 0.5
    assert differing(history, train(FaultPlan())[1], 2) == []
    if "delayed" not in request.node.name:  # no other thread runs either
        assert (
            max(later - earlier for earlier, later in itertools.pairwise([start, *ticks, start + took]))
            >= 0.4
        )


def killed(log: Path) -> None:
    train(FaultPlan().signal(rank=0, step=2, number=signal.SIGKILL), log=log)


@pytest.mark.slow
def test_a_killed_process_is_still_seen_to_have_been_killed(tmp_path: Path):
    process = start_process(killed, tmp_path / "fired.jsonl")
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert json.loads((tmp_path / "fired.jsonl").read_text())["step"] == 2


def test_a_plan_can_be_pickled():
    plan = FaultPlan().flip_bit(rank=5, at="layer.2/weight", step=7, bit=30).showing("layer.2/output")
    assert pickle.loads(pickle.dumps(plan)) == plan
