"""Layouts in which DeepSpeed is seen to train as it does alone, the names of what is in them, and what may
go wrong there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.deepspeed_jobs import Plan
from torchscout.faults.plan import FaultPlan

FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
"""With it, DeepSpeed takes its optimizer for bfloat16."""
SOME_SMALL = {"stage3_param_persistence_threshold": 20}
"""Norms and biases are small enough to stay gathered."""
WITHIN_PAIRS = {**SOME_SMALL, "zero_hpz_partition_size": 2}
"""Two ranks hold all parameters between them, besides."""
EXPERTS = tuple(
    f"stack.{layer}.routed.moe.deepspeed_moe.experts.deepspeed_experts.{each}"
    for layer in (0, 1)
    for each in (0, 1)
)
LLAMA = ("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head")


def scaled(stage: int, power: int, **more: Any) -> Plan:
    """Losses are scaled; gradients overflow in some steps, whose updates are skipped."""
    scaling = {"enabled": True, "initial_scale_power": power, "loss_scale_window": 2, "hysteresis": 1}
    return Plan(stage, settings={"fp16": scaling}, **more)


OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
"""Optimizers step on the host."""
OFFLOAD_ALL = {**OFFLOAD, **SOME_SMALL, "offload_param": {"device": "cpu", "pin_memory": False}}
TORCH_ADAM = {"zero_force_ds_cpu_optimizer": False}
"""Otherwise DeepSpeed compiles an optimizer of its own for the host."""


def offloaded(stage: int, **more: Any) -> Plan:
    """Optimizer state is on the host; under ZeRO 3 so are the parameters."""
    return Plan(stage, settings=TORCH_ADAM, zero=OFFLOAD_ALL if stage == 3 else OFFLOAD, **more)


HEALTHY = {
    "zero-2 bf16, offloaded": offloaded(2, bf16=True),
    "zero-2 bf16": Plan(2, bf16=True),
    "zero-3 bf16": Plan(3, bf16=True, zero=SOME_SMALL),
    "pipeline zero-1 bf16": Plan(1, "pipeline", bf16=True),
    "experts zero-2 bf16": Plan(2, "mixture", bf16=True),
    "autotp zero-1 bf16": Plan(1, "tensor", bf16=True),
}
MORE = {
    "zero-1, offloaded": offloaded(1),
    "zero-3 bf16, offloaded": offloaded(3, bf16=True),
    "streams by name": Plan(1, "streams"),
    "zero-2 fp16, skipped updates": scaled(2, 20),
    "zero-0": Plan(0),
    "zero-0 bf16": Plan(0, bf16=True),
    "zero-0 fp16, skipped updates": scaled(0, 26),
    "zero-1": Plan(1),
    "zero-1 bf16 optimizer": Plan(1, bf16=True, settings=FP32_SUMS),
    "zero-2": Plan(2),
    "zero-3": Plan(3, zero=SOME_SMALL),
    "zero-3, all gathered": Plan(3),
    "zero-3 hpZ": Plan(3, zero=WITHIN_PAIRS),
    "zero-3 fp16, skipped updates": scaled(3, 20, zero=SOME_SMALL),
    "zero-3, born in shards": Plan(3, "born_sharded", zero=SOME_SMALL),
    "pipeline zero-0": Plan(0, "pipeline"),
    "ulysses zero-1": Plan(1, "ulysses", bf16=True),
    "ulysses zero-3": Plan(3, "ulysses", zero=SOME_SMALL),
    "experts zero-0": Plan(0, "mixture"),
    "experts zero-1": Plan(1, "mixture"),
    "autotp zero-0": Plan(0, "tensor"),
    "autotp zero-2": Plan(2, "tensor"),
    "autotp zero-3 bf16": Plan(3, "tensor", bf16=True, zero=SOME_SMALL),
}


def each_of(plans: Mapping[str, Any], *marks: pytest.MarkDecorator) -> list[Any]:
    tuples = {name: each if isinstance(each, tuple) else (each,) for name, each in plans.items()}
    return [pytest.param(*each, id=name, marks=marks) for name, each in tuples.items()]


def weight(at: str, rank: int, step: int = 2) -> FaultPlan:
    """A bit of a module's weight flips after an update."""
    return FaultPlan().flip_bit(rank=rank, at=f"{at}/weight", step=step, bit=2)


def miscalculated(at: str, rank: int, step: int = 2) -> FaultPlan:
    """A module gets a number wrong, in the second batch of a step and in all replays of it."""
    return FaultPlan().flip_bit(rank=rank, at=at, step=step, bit=2, calls=range(1, 200))
