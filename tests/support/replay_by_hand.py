"""A source and its peers in one process, whose replays are driven call by call, in the numbered order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchscout.errors import ReplayError
from torchscout.replay.capture.hooks import CallCapture
from torchscout.replay.recipe import Observation, Replay, finish_signatures
from torchscout.replay.recipes.layer import LayerRecipe
from torchscout.utils.reentrancy import own_work

CPU = torch.device("cpu")


def described(replays: Sequence[Replay]) -> list[Any]:
    """Return every peer's description as it arrives at the others."""
    return [json.loads(json.dumps(replay.describe())) for replay in replays]


def prepare(replays: Sequence[Replay], source: int = 0) -> list[Any]:
    descriptions = described(replays)
    for replay in replays:
        replay.prepare(descriptions, source)
    return descriptions


def align(replays: Sequence[Replay], source: int = 0) -> None:
    """Describe, prepare, and let the peers receive the source's bytes."""
    prepare(replays, source)
    sent: list[torch.Tensor] = []
    replays[source].align(lambda tensor: sent.append(tensor.clone()))
    for place, replay in enumerate(replays):
        if place != source:
            replay.align(receiver(sent))


def receiver(sent: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """Return the receiving end of a broadcast."""
    pending = iter(sent)

    def receive(tensor: torch.Tensor) -> None:
        values = next(pending)
        assert tensor.is_contiguous()
        assert (tensor.dtype, tensor.shape) == (values.dtype, values.shape)
        tensor.copy_(values)

    return receive


def observe(replay: Replay, variant: float = 1.0) -> dict[str, int]:
    """Observe as the replayer does: with SCOUT's own hooks inert."""
    seen = Observation(variant)
    with own_work():
        replay.observe(seen)
    finish_signatures([seen])
    return seen.signatures


def observations(replays: Sequence[Replay], variant: float = 1.0) -> list[dict[str, int]]:
    """Observe on each peer, with a different random state on each."""
    found = []
    for place, replay in enumerate(replays):
        torch.manual_seed(place)
        random.seed(place)
        np.random.seed(place)
        found.append(observe(replay, variant))
    for replay, signatures in zip(replays, found, strict=True):
        assert sorted(signatures) == sorted(each.surface for each in replay.comparisons())
    return found


def differing(found: Sequence[dict[str, int]]) -> set[str]:
    """Return the surfaces on which peers differ."""
    assert all(each.keys() == found[0].keys() for each in found)
    return {surface for surface in found[0] if len({each[surface] for each in found}) > 1}


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


@contextmanager
def armed(module: nn.Module, *, keep: bool = True) -> Iterator[CallCapture]:
    capture = CallCapture(module, CPU, keep=keep)
    try:
        yield capture
    finally:
        capture.disarm()


def reason(capture: CallCapture) -> str:
    with pytest.raises(ReplayError) as caught:
        capture.invocation()
    return str(caught.value)


def calling(forward: Callable[..., Any]) -> nn.Module:
    return Calling(forward, width=2)


def doubling() -> nn.Module:
    return calling(lambda self, x: x * self.weight)


def x(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)
