"""Equal modules on several ranks of one process, each trained for one step on a batch of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.support.replay_by_hand import (
    CPU,
    align,
)
from torchscout.replay.recipe import Replay
from torchscout.replay.recipes.layer import LayerRecipe

NAME = "layer.0"


Make = Callable[[], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.relu(self.norm(self.up(x)))))


class Calling(nn.Module):
    """A module with the forward function of the test."""

    def __init__(self, forward: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def batch(rank: int) -> torch.Tensor:
    """Return the batch of a rank."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def sized(output: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient differs from rank to rank."""
    return output.square().sum()


def recipe_of(module: nn.Module) -> LayerRecipe:
    surfaces = {each: f"{NAME}.{name}" for name, each in module.named_parameters()}
    return LayerRecipe("layer", {NAME: module}, surfaces, CPU)


class Job:
    """Ranks with equal modules, each of which has made one training step on its own batch."""

    def __init__(
        self,
        make: Make,
        *,
        train: Callable[[nn.Module, int], Any] = lambda module, rank: sized(module(batch(rank))).backward(),
        ranks: int = 3,
        source: int = 0,
        prepared: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        self.modules, self.replays, self.source = [], [], source
        for rank in range(ranks):
            torch.manual_seed(0)
            module = make()
            prepared(module)
            self.modules.append(module)
            self.replays.append(recipe_of(module).begin(0, is_source=rank == source))
            torch.manual_seed(rank)
            train(module, rank)

    def aligned(self) -> Sequence[Replay]:
        align(self.replays, self.source)
        return self.replays
