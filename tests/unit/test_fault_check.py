"""A plan that cannot be carried out, or that nobody could see, is refused before anything starts."""

from __future__ import annotations

import pytest
import torch

from tests.unit.test_faults import Block
from torchscout.faults.fault import Recurring
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh

FOUR = Mesh.grid(replica=4)
GROUP = {"at": "all_reduce@training", "axis": "replica"}


def test_a_possible_plan_is_accepted():
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
    plan.check(FOUR, Block())
    plan.check(4, Block())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            FaultPlan().scale(rank=4, at="layer.0/output", step=1, factor=2),
            "on rank 4 at 'layer.0/output': the job has ranks 0 to 3",
        ),
        (
            FaultPlan().scale(rank=0, at="layers.0/output", step=1, factor=2),
            "no module 'layers.0'; did you mean 'layer.0'",
        ),
        (
            FaultPlan().scale(rank=0, at="layer.1/wait", step=1, factor=2),
            "no parameter 'layer.1.wait'; did you mean 'layer.1.weight'",
        ),
        (FaultPlan().scale(rank=0, at="somewhere", step=1, factor=2), "'somewhere' is not a site"),
        (
            FaultPlan().scale(rank=0, at="allreduce@tp", step=1, factor=2),
            "PyTorch has no collective 'allreduce'; did you mean 'all_reduce'",
        ),
        (
            FaultPlan().flip_bit(rank=0, at="layer.1/weight", step=1, bit=32),
            "at 'layer.1/weight': torch.float32 has bits 0 to 31, got 32",
        ),
        (
            FaultPlan().flip_bit(rank=0, at="layer.1/bias", step=1, bit=0, index=4),
            "no element 4 in a tensor of 4",
        ),
        (FaultPlan().scale(rank=0, at="step", step=1, factor=2), "this site has no tensor"),
        (FaultPlan().scale(rank=0, at="layer.0/forward", step=1, factor=2), "this site has no tensor"),
        (
            FaultPlan().scale(rank=0, at="recv@mesh_pp", step=1, factor=2),
            "point-to-point messages cannot be corrupted",
        ),
        (FaultPlan().delay(rank=0, at="step", step=1, seconds=1), "cannot be detected"),
        (FaultPlan().delay(rank=0, at="layer.0/weight", step=1, seconds=1), "cannot be detected"),
        (
            FaultPlan().skip_collective(rank=0, at="layer.0/output", axis="replica", step=1),
            "needs a collective",
        ),
        (
            FaultPlan().scale(rank=0, at="layer.0/output", step=1, factor=2).showing("time/module"),
            "no sdc shows on 'time/module'",
        ),
        (
            FaultPlan().delay(rank=0, at="layer.0/forward", step=1, seconds=1).showing("layer.0/output"),
            "no straggler shows on 'layer.0/output'",
        ),
        (
            FaultPlan().stall(rank=0, at="step", step=1, seconds=1).showing("time/module"),
            "no hang shows on 'time/module'",
        ),
    ],
)
def test_an_impossible_fault_is_refused(plan: FaultPlan, message: str):
    for world in (FOUR, 4):
        with pytest.raises(ValueError, match=message):
            plan.check(world, Block())


def test_a_fault_that_the_mesh_cannot_detect_is_refused():
    plan = FaultPlan().scale(rank=0, at="layer.0/output", step=1, factor=2)
    with pytest.raises(ValueError, match="hits only training's own pass"):
        plan.check(FOUR, Block())
    shard = FaultPlan().scale(rank=0, at="layer.0/weight.grad", step=1, factor=2)
    with pytest.raises(ValueError, match="cannot be detected: only its owner has that shard"):
        shard.check(Mesh.grid(shard=4), Block())
    with pytest.raises(ValueError, match="rank 0 has no peer to be compared with in this mesh"):
        plan.check(Mesh.grid(tensor=2), Block())
    FaultPlan().stall(rank=0, at="step", step=1, seconds=1).check(Mesh.grid(tensor=2), Block())
    with pytest.raises(ValueError, match="pass axis, one of"):
        FaultPlan().delay(rank=0, at="all_reduce@tp", step=1, seconds=1).check(FOUR, Block())


def test_every_rank_of_a_pipeline_checks_its_own():
    plan = FaultPlan().scale(rank=0, at="layer.0/output", step=1, factor=2)
    plan = plan.scale(rank=1, at="head/output", step=1, factor=2)
    plan.of(0).check(2, Block())
    with pytest.raises(ValueError, match="no module 'head'"):
        plan.of(1).check(2, Block())


def test_a_check_leaves_the_model_unchanged():
    model = Block()
    before = [value.clone() for value in model.state_dict().values()]
    FaultPlan().scale(rank=0, at="layer.1/weight", step=1, factor=2).check(4, model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: Recurring(range(1, 5), 0.0), "above 0 and at most 1, got 0.0"),
        (lambda: Recurring(range(1, 5), 1.5), "above 0 and at most 1, got 1.5"),
        (lambda: FaultPlan().kill(rank=0, step=range(3, 3)), "steps count from 1"),
        (lambda: FaultPlan().kill(rank=0, step=Recurring(range(5), 0.5)), "steps count from 1"),
        (
            lambda: FaultPlan().change_collective(rank=0, **GROUP, step=1, what="colour"),
            "cannot change 'colour' of a collective; use one of dtype, operation, shape",
        ),
    ],
)
def test_invalid_arguments_are_refused_when_the_plan_is_built(plan, message: str):
    with pytest.raises(ValueError, match=message):
        plan()
