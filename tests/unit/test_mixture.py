"""Experts are found by their structure, and layers without them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchscout.adapters.structure import experts_of, layers_of, without_experts


class Stack(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts, 4, 8))
        self.down = nn.Parameter(torch.zeros(experts, 8, 4))

    def forward(self, x):
        return x


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x))


class Mixture(nn.Module):
    def __init__(self, experts: nn.Module, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(16, count, bias=False)
        self.experts = experts

    def forward(self, x):
        return x


class Block(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)
        self.norm = nn.LayerNorm(4)
        self.feed = mixture

    def forward(self, x):
        return x


def model(make, blocks: int = 2) -> nn.Module:
    whole = nn.Module()
    whole.layers = nn.ModuleList(Block(make()) for _ in range(blocks))
    return whole


def names(parts) -> list[str]:
    return [part.name for part in parts]


def test_a_stack_of_matrices_is_one_part_and_a_list_beside_a_router_one_for_each():
    stacked = model(lambda: Mixture(Stack(4), 4))
    assert names(experts_of(stacked)) == ["layers.0.feed.experts", "layers.1.feed.experts"]
    listed = model(lambda: Mixture(nn.ModuleList(Expert() for _ in range(2)), 2), blocks=1)
    assert names(experts_of(listed)) == ["layers.0.feed.experts.0", "layers.0.feed.experts.1"]


def test_experts_may_be_named_with_a_star():
    stacked = model(lambda: Mixture(Stack(4), 4))
    assert names(experts_of(stacked, "layers.1.*.experts")) == ["layers.1.feed.experts"]
    assert names(experts_of(stacked, ("layers.*.feed.experts",))) == names(experts_of(stacked))
    with pytest.raises(ValueError, match=r"experts='layers.\*.moe' matches no module"):
        experts_of(stacked, "layers.*.moe")


def test_of_a_layer_with_experts_only_the_parts_without_them_are_dense():
    mixed = model(lambda: Mixture(Stack(4), 4))
    mixed.layers[1].feed = Expert()
    dense = without_experts(layers_of(mixed), experts_of(mixed))
    assert names(dense) == [
        "layers.0.attention",
        "layers.0.norm",
        "layers.0.feed.router",
        "layers.1",
    ]
