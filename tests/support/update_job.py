"""Ranks in one process that hold the same parameters and replay the update of their optimizer together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from torchscout.replay.recipe import Observation, Replay, finish_signatures
from torchscout.replay.recipes.optimizer import OptimizerRecipe

CPU = torch.device("cpu")
Parameters = dict[str, torch.nn.Parameter]
MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]


class Rank:
    """One replica: parameters, its optimizer, and the recipe that watches it."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], make: MakeOptimizer, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = {
            f"layer.{i}/weight": torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for i, shape in enumerate(shapes)
        }
        self.optimizer = make(self.parameters)
        self.recipe = OptimizerRecipe(self.parameters, [self.optimizer], CPU)
        self._generator = torch.Generator().manual_seed(2)

    def backward(self) -> None:
        """Set a gradient of every parameter: the same on all ranks, another in each step."""
        for parameter in self.parameters.values():
            values = torch.randn(parameter.shape, generator=self._generator)
            parameter.grad = values.to(parameter.dtype)

    def step(self) -> None:
        self.backward()
        self.optimizer.step()


def observed(replay: Replay, variant: float = 1.0) -> Mapping[str, int]:
    seen = Observation(variant)
    replay.observe(seen)
    finish_signatures([seen])
    return seen.signatures


@dataclass
class Round:
    """One replay on all ranks, after the broadcast."""

    replays: list[Replay]
    descriptions: list[dict]

    def observe(self, variant: float = 1.0) -> list[Mapping[str, int]]:
        observations = [observed(replay, variant) for replay in self.replays]
        surfaces = [[comparison.surface for comparison in replay.comparisons()] for replay in self.replays]
        assert [list(signatures) for signatures in observations] == surfaces
        assert surfaces[1:] == surfaces[:-1]
        return observations

    def release(self) -> None:
        for replay in self.replays:
            replay.release()


class Job:
    def __init__(
        self,
        make: MakeOptimizer,
        shapes: Sequence[tuple[int, ...]] = ((33, 67),),
        dtype: torch.dtype = torch.float32,
        ranks: int = 3,
    ) -> None:
        self.ranks = [Rank(shapes, make, dtype) for _ in range(ranks)]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for rank in self.ranks:
                rank.step()

    def replay(
        self,
        target: int = 0,
        *,
        source: int = 0,
        step: Callable[[Rank], None] = Rank.step,
        damaged: int | None = None,
        damaged_tensor: int = 1,
    ) -> Round:
        """Train one step with a replay; on the way to rank ``damaged`` one bit of a tensor changes."""
        replays = [rank.recipe.begin(target, is_source=i == source) for i, rank in enumerate(self.ranks)]
        for rank in self.ranks:
            step(rank)
        descriptions = [json.loads(json.dumps(replay.describe())) for replay in replays]
        for replay in replays:
            replay.prepare(descriptions, source)
        sent: list[torch.Tensor] = []
        replays[source].align(lambda tensor: sent.append(tensor.clone()))
        for i, replay in enumerate(replays):
            if i != source:
                replay.align(_receiver(sent, damaged_tensor if i == damaged else None))
        return Round(replays, descriptions)


def _receiver(sent: list[torch.Tensor], damaged: int | None) -> Callable[[torch.Tensor], None]:
    pending = iter(enumerate(sent))

    def receive(tensor: torch.Tensor) -> None:
        number, values = next(pending)
        tensor.copy_(values)
        if number == damaged:
            tensor[0] ^= 1

    return receive


def flip_lowest_bit(tensor: torch.Tensor, element: int = 0) -> None:
    """Flip the lowest bit of one element, in the order of memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    flat[element : element + 1].view(torch.uint8)[0] ^= 1


def outliers(found: Sequence[Mapping[str, int]], surface: str) -> list[int]:
    """Return the ranks that differ from the value of the majority."""
    values = [signatures[surface] for signatures in found]
    usual = max(values, key=values.count)
    return [i for i, value in enumerate(values) if value != usual]
