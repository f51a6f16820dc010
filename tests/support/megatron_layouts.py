"""Layouts in which Megatron-Core is seen to train as it does alone, and what is replayed in each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.megatron_models import Trial
from torchscout.config import RECIPES, ReplayConfig


def each_of(trials: dict[str, tuple[object, ...]], *marks: pytest.MarkDecorator) -> list[object]:
    return [pytest.param(*each, id=name, marks=marks) for name, each in trials.items()]


REPLICAS, TENSOR = Trial(), Trial(tensor=2)
PIPELINE = Trial(pipeline=2)
VIRTUAL = Trial(pipeline=2, virtual=2, layers=4, microbatches=4)
SHARDED = Trial(sharded=True)
INSTANCES = Trial(sharded=True, instances=2)
"""Two ranks have the optimizer's state between them, and so have the other two."""
FSDP = Trial(sharded=True, fsdp=True)
EXPERTS = Trial(experts=4, expert=2)


def without(recipe: str) -> ReplayConfig:
    return ReplayConfig(interval=1, recipes=tuple(each for each in RECIPES if each != recipe))


GATHERED = replace(EXPERTS, dispatcher="allgather", replay=without("all_to_all"))
RECOMPUTED = replace(REPLICAS, recomputed="full", replay=without("layer"))
SCALED = Trial(dtype="float16", scale=2.0**19)
"""The first two updates are skipped: scaled gradients are not finite."""
MIXED = Trial(experts=4, expert=2, tensor=2, sequence=True)
"""Experts are whole on each rank, all else is in parts."""
NO_REPLAY = replace(FSDP, experts=4, expert=2)
"""Not supported."""
LAYER = {
    "layers": {"decoder.layers.0", "decoder.layers.1"},
    "parts": {
        f"decoder.layers.0.{each}"
        for each in ("self_attention", "mlp.router", "mlp.experts.local_experts.1", "pre_mlp_layernorm")
    },
    "chunks": {"0.module.decoder.layers.0", "1.module.decoder.layers.0"},
    "stage": {"decoder.layers.0"},
}
HEALTHY = {
    "tensor and sequence": (Trial(tensor=2, sequence=True), "layers"),
    "experts, optimizer shards": (Trial(experts=4, expert=2, sharded=True, steps=8), "parts"),
    "virtual pipeline": (VIRTUAL, "chunks"),
    "two instances": (INSTANCES, "layers"),
}
MORE = {
    "parameter shards": (FSDP, "layers"),
    "fused gradients, skipped updates": (replace(SCALED, fused=True), "layers"),
    "replicas": (REPLICAS, "layers"),
    "tensor": (TENSOR, "layers"),
    "recomputed": (RECOMPUTED, "none"),
    "attention recomputed": (replace(REPLICAS, recomputed="selective"), "layers"),
    "pipeline": (PIPELINE, "stage"),
    "tied pipeline": (Trial(pipeline=2, tied=True), "stage"),
    "context": (Trial(context=2), "layers"),
    "optimizer shards": (SHARDED, "layers"),
    "optimizer shards, overlapping": (Trial(sharded=True, overlap=True), "layers"),
    "two instances, overlapping, bfloat16": (
        replace(INSTANCES, overlap=True, dtype="bfloat16"),
        "layers",
    ),
    "bfloat16": (Trial(dtype="bfloat16"), "layers"),
    "bfloat16, optimizer shards": (Trial(dtype="bfloat16", sharded=True), "layers"),
    "parameter shards, bfloat16": (replace(FSDP, dtype="bfloat16"), "layers"),
    "parameter shards, fused gradients": (replace(FSDP, fused=True), "layers"),
    "parameter shards, tensor": (replace(FSDP, tensor=2), "layers"),
    "parameter shards, context": (replace(FSDP, context=2), "layers"),
    "experts on every rank": (Trial(experts=4), "layers"),
    "experts, gathered tokens": (replace(GATHERED, steps=8), "parts"),
    "experts": (replace(EXPERTS, steps=8), "parts"),
    "experts, tensor": (replace(MIXED, steps=8), "parts"),
    "experts without peers, pipeline": (Trial(experts=4, expert=2, pipeline=2), "none"),
}
LARGE = {
    "pipeline of four, virtual": (Trial(pipeline=4, virtual=2, layers=8, microbatches=4), "chunks"),
    "experts, pipeline": (Trial(experts=4, expert=2, pipeline=2, steps=8), "parts"),
    "parameter shards, tensor": (replace(FSDP, tensor=2), "layers"),
    "tensor, pipeline": (Trial(tensor=2, pipeline=2), "stage"),
    "tensor, pipeline, sequence, experts, optimizer shards": (
        Trial(tensor=2, pipeline=2, sequence=True, experts=4, expert=2, sharded=True),
        "parts",
    ),
    "tensor, context, replicas": (Trial(tensor=2, context=2), "layers"),
}
