"""Replays experts at the shapes of a catalog, one at a time (paper, section 6.2).

Routing decides how many rows an expert gets, and a fault may show at some numbers of rows alone. So each
check takes the next shape that represents others, and makes it of the rows that were captured in this step.
Where there is no catalog, experts are replayed as training called them. The router is a dense layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from torchscout.decision.record import Surface
from torchscout.experts.coverage import Rows
from torchscout.mesh import LayerKind
from torchscout.replay.capture.invocation import Invocation, RowResize
from torchscout.replay.compiled import CompiledCode
from torchscout.replay.recipe import Given
from torchscout.replay.recipes.layer import LayerRecipe, LayerReplay
from torchscout.replay.sharded_parameters import NOBODY, ParameterGatherers

__all__ = ["ExpertsRecipe"]


class ExpertsRecipe(LayerRecipe):
    """Every expert module at every shape; those of one shape follow each other."""

    is_dynamic = True

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        shapes: Mapping[str, Sequence[Rows]],
        surfaces: Mapping[torch.Tensor, Surface],
        device: torch.device,
        gatherers: Callable[[nn.Module], ParameterGatherers] = lambda _: NOBODY,
        compiled: CompiledCode | None = None,
    ) -> None:
        """``shapes`` of each module; one that has none is replayed as it was called."""
        super().__init__("experts", modules, surfaces, device, gatherers, LayerKind.EXPERT, compiled)
        chosen: dict[str, Sequence[Rows | None]] = {name: shapes.get(name) or [None] for name in modules}
        most = max(map(len, chosen.values()), default=0)
        self._turns: list[tuple[int, Rows | None]] = [
            (place, of_module[turn])
            for turn in range(most)
            for place, of_module in enumerate(chosen.values())
            if turn < len(of_module)
        ]
        self.targets = tuple(_spelled(self._names[place], rows) for place, rows in self._turns)

    def kept_as(self, target: int) -> str:
        """All shapes are made of one call."""
        return self._names[self._turns[target][0]]

    def begin(self, target: int, *, is_source: bool) -> LayerReplay:
        return self._shaped(target, is_source)

    def again(self, target: int, given: Given) -> LayerReplay:
        return self._shaped(target, given.is_source, self._recalled(self._turns[target][0], given))

    def _shaped(self, target: int, is_source: bool, call: Invocation | None = None) -> LayerReplay:
        place, rows = self._turns[target]
        replay = self._replay(place, is_source, call)
        replay.rerouting = None if rows is None else RowResize(rows)
        return replay


def _spelled(name: str, rows: Rows | None) -> str:
    """A target's name: the module, and at which shape."""
    if rows is None:
        return name
    counts = str(rows[0]) if len(set(rows)) == 1 else ",".join(map(str, rows))
    return f"{name} x{counts}"
