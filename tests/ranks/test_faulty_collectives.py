"""Faults of collectives change exactly the planned call, whoever issues it.

All ranks have the same fault here, so that none is left behind: what a job does whose ranks differ in that is
for the tests of hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.support.replay_results import local_of
from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import listen
from torchscout.faults.effects import CHANGES
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan

STEPS, FAULTY_STEP = 4, 3


class StepRecorder:
    """What each step issues, in words."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = [[]]

    def before(self, call: Call) -> None:
        shapes = call.input_shapes or call.output_shapes
        self.steps[-1].append(f"{call.operation} {call.dtype} {shapes}".replace("torch.", ""))

    def issued(self, *_: Any) -> None:
        """Not of interest."""


def ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def fsdp(net: nn.Module) -> nn.Module:
    return fully_shard(net)


def by_hand(net: nn.Module) -> nn.Module:
    return net


def tensor(net: nn.Module) -> nn.Module:
    """The input is gathered, in a forward hook; what arrives for it is summed up and scattered."""
    style = ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(-1))
    return parallelize_module(net, init_device_mesh("cpu", (2,)), style)


class _Exchanged(nn.Module):
    """Rows change places, as those of experts do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        ones = [1, 1]
        moved: torch.Tensor = self.net(
            all_to_all_single_autograd(rows.repeat(2, 1), ones, ones, dist.group.WORLD)
        )
        return moved


def exchanged(net: nn.Module) -> nn.Module:
    return _Exchanged(net)


KINDS = {each.__name__: each for each in (ddp, fsdp, by_hand, tensor, exchanged)}


def train(rank: int, kind: str, faults: FaultPlan) -> tuple[list[list[str]], list[list[float]], int]:
    """What was issued in each step, the parameters after it, and how many faults fired."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4, bias=False)
    model = KINDS[kind](net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder, weights = StepRecorder(), []
    with Injector(faults, rank, model, optimizer) as injector, listen(recorder):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.full((1, 4), rank + 1.0, requires_grad=True)).sum().backward()
            if kind == "by_hand":
                dist.all_reduce(net.weight.grad)
                dist.broadcast(torch.ones(2), src=0)
                dist.broadcast(torch.ones(3), src=0)
            optimizer.step()
            weights.append(local_of(next(model.parameters())).detach().flatten().tolist())
            recorder.steps.append([])
    return recorder.steps[:-1], weights, len(injector.fired)


PLANS: dict[str, Callable[..., FaultPlan]] = {
    "skip": FaultPlan.skip_collective,
    "swap": FaultPlan.swap_collectives,
    **{what: partial(FaultPlan.change_collective, what=what) for what in CHANGES},
}


def everywhere(how: str, at: str) -> FaultPlan:
    plan = FaultPlan()
    for rank in (0, 1):
        plan = PLANS[how](plan, rank=rank, at=at, axis="replica", step=FAULTY_STEP)
    return plan


def compared(kind: str, faults: FaultPlan) -> tuple[list[str], list[str], list[list[list[float]]]]:
    """What the faulty step issues with the fault and without, and all weights with it.

    The steps before and after it issue what they always do.
    """
    healthy = run_ranks(train, 2, kind, FaultPlan(), timeout=60)
    results = run_ranks(train, 2, kind, faults, timeout=60)
    for (clean, usual, _), (issued, weights, fired) in zip(healthy, results, strict=True):
        assert fired == 1
        others = [step for step in range(STEPS) if step != FAULTY_STEP - 1]
        assert [issued[step] for step in others] == [clean[step] for step in others]
        assert weights[: FAULTY_STEP - 1] == usual[: FAULTY_STEP - 1]
    issued, clean = results[0][0], healthy[0][0]
    return issued[FAULTY_STEP - 1], clean[FAULTY_STEP - 1], [weights for _, weights, _ in results]


def test_ddp_goes_on_without_the_sum_that_was_left_out():
    faulty, clean, (first, second) = compared("ddp", everywhere("skip", "all_reduce@default_pg"))
    assert clean == [*faulty, "all_reduce float32 ((16,),)"]
    assert first[FAULTY_STEP - 2] == second[FAULTY_STEP - 2]
    assert first[FAULTY_STEP - 1] != second[FAULTY_STEP - 1], "each has applied its own gradient"


@pytest.mark.parametrize(
    ("what", "issued"),
    [
        ("shape", "all_reduce float32 ((32,),)"),
        ("dtype", "all_reduce float64 ((16,),)"),
        ("operation", "all_gather float32 ((16,),)"),
    ],
)
def test_ddp_issues_something_else(what: str, issued: str):
    faulty, clean, _ = compared("ddp", everywhere(what, "all_reduce@default_pg"))
    assert clean[-1] == "all_reduce float32 ((16,),)"
    assert faulty == [*clean[:-1], issued]


def test_fsdp_goes_on_without_the_parameters_that_were_not_gathered():
    faulty, clean, _ = compared("fsdp", everywhere("skip", "all_gather@default_pg"))
    left_out = clean.index(next(each for each in clean if each.startswith("all_gather")))
    assert faulty == clean[:left_out] + clean[left_out + 1 :]


def test_two_swapped_collectives_are_both_issued():
    faulty, clean, _ = compared("by_hand", everywhere("swap", "all_reduce@default_pg"))
    first, second, third = clean
    assert first == "all_reduce float32 ((4, 4),)"
    assert faulty == [second, first, third]


@pytest.mark.parametrize(
    ("kind", "at", "usual", "issued"),
    [
        ("tensor", "all_gather", "all_gather float32 ((1, 4),)", "all_gather float64 ((1, 4),)"),
        ("tensor", "reduce_scatter", "reduce_scatter float32 ((2, 4),)", "reduce_scatter float64 ((2, 4),)"),
        ("exchanged", "all_to_all", "all_to_all float32 ((2, 4),)", "all_to_all float64 ((2, 4),)"),
    ],
    ids=["gathered", "scattered", "exchanged"],
)
def test_what_functional_operators_issue_can_be_something_else(kind: str, at: str, usual: str, issued: str):
    faulty, clean, _ = compared(kind, everywhere("dtype", f"{at}@default_pg"))
    place = clean.index(usual)
    assert faulty == [*clean[:place], issued, *clean[place + 1 :]]
