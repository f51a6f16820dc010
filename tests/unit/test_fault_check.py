"""A plan that cannot be carried out, or that nobody could see, is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.unit.test_faults import Block
from torchscout.faults.fault import Recurring
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

FOUR = Mesh.grid(replica=4)
GROUP = {"at": "all_reduce@training", "axis": "replica"}


def scaled(at: str, rank: int = 0) -> FaultPlan:
    return FaultPlan().scale(rank=rank, at=at, step=1, factor=2)


def slow(at: str) -> FaultPlan:
    return FaultPlan().delay(rank=0, at=at, step=1, seconds=1)


def test_a_possible_plan_is_accepted_and_the_model_left_as_it_is():
    plan = (
        FaultPlan()
        .flip_bit(rank=3, at="layer.2/weight", step=7, bit=31, index=15)
        .flip_bits(rank=0, at="layer.0/output", step=Recurring(range(1, 9), 0.5), bits=[1, 2], calls=None)
        .scale(rank=0, at="layer.1/bias.exp_avg", step=1, factor=2)
        .set_value(rank=0, at="broadcast@torchscout", step=1, value=2)
        .delay(rank=1, at="layer.0/backward", step=2, seconds=1)
        .delay(rank=1, at="checkpoint_write", step=3, seconds=1)
        .slow_collective(ranks=[1], **GROUP, step=4, seconds=1)
        .stall(rank=2, at="step", step=5, seconds=1)
        .skip_collective(rank=2, **GROUP, step=6)
        .showing("deadlock|fingerprint/training")
    )
    model = Block()
    before = [value.clone() for value in model.state_dict().values()]
    plan.check(FOUR, model)
    plan.check(4, model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (scaled("layer.0/output", rank=4), "ranks 0 to 3"),
        (scaled("layers.0/output"), "'layers.0'.*'layer.0'"),
        (scaled("layer.1/wait"), "'layer.1.wait'.*'layer.1.weight'"),
        (scaled("somewhere"), "'somewhere' is not a site"),
        (scaled("allreduce@tp"), "'allreduce'.*'all_reduce'"),
        (FaultPlan().flip_bit(rank=0, at="layer.1/weight", step=1, bit=32), "bits 0 to 31, got 32"),
        (FaultPlan().flip_bit(rank=0, at="layer.1/bias", step=1, bit=0, index=4), "no element 4"),
        (scaled("step"), "no tensor"),
        (scaled("layer.0/forward"), "no tensor"),
        (scaled("recv@mesh_pp"), "cannot be corrupted"),
        (slow("step"), "cannot be detected"),
        (slow("layer.0/weight"), "cannot be detected"),
        (FaultPlan().skip_collective(rank=0, at="layer.0/output", axis="replica", step=1), "collective"),
        (scaled("layer.0/output").showing("time/module"), "no sdc shows on 'time/module'"),
        (slow("layer.0/forward").showing("layer.0/output"), "no straggler shows on"),
        (FaultPlan().stall(rank=0, at="step", step=1, seconds=1).showing("time/module"), "no hang shows"),
        (FaultPlan().kill(rank=0, step=1).showing("issued/tp"), "no crash shows on 'issued/tp'"),
    ],
)
def test_an_impossible_fault_is_refused(plan: FaultPlan, message: str):
    for world in (FOUR, 4):
        with pytest.raises(ValueError, match=message):
            plan.check(world, Block())


@pytest.mark.parametrize(
    ("plan", "mesh", "message"),
    [
        (scaled("layer.0/output"), FOUR, "only training's own pass"),
        (scaled("layer.0/weight.grad"), Mesh.grid(shard=4), "cannot be detected"),
        (scaled("layer.0/output"), Mesh.grid(tensor=2), "rank 0 has no peer"),
        (slow("all_reduce@tp"), FOUR, "pass axis"),
    ],
)
def test_a_fault_that_the_mesh_cannot_detect_is_refused(plan: FaultPlan, mesh: Mesh, message: str):
    with pytest.raises(ValueError, match=message):
        plan.check(mesh, Block())


def test_every_rank_of_a_pipeline_checks_its_own():
    plan = FaultPlan().scale(rank=0, at="layer.0/output", step=1, factor=2)
    plan = plan.scale(rank=1, at="head/output", step=1, factor=2)
    plan.of(0).check(2, Block())
    with pytest.raises(ValueError, match="no module 'head'"):
        plan.of(1).check(2, Block())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: Recurring(range(1, 5), 0.0), "got 0.0"),
        (lambda: Recurring(range(1, 5), 1.5), "got 1.5"),
        (lambda: FaultPlan().kill(rank=0, step=0), "count from 1"),
        (lambda: FaultPlan().kill(rank=0, step=range(3, 3)), "count from 1"),
        (lambda: FaultPlan().kill(rank=0, step=Recurring(range(5), 0.5)), "count from 1"),
        (lambda: FaultPlan().kill(rank=-1, step=1), "got -1"),
        (lambda: FaultPlan().change_collective(rank=0, **GROUP, step=1, what="colour"), "'colour'.*shape"),
    ],
)
def test_invalid_arguments_are_refused_when_the_plan_is_built(plan: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        plan()
