"""Replays experts at the shapes of a catalog, one at a time (paper, section 6.2).

Routing decides how many rows an expert receives, and a fault may show only at certain numbers of rows. So
each check takes the next representative shape, and fills it with rows that were captured in this step.
Without a catalog, experts are replayed as training called them. The router is a dense layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from torchscout.decision.record import Surface
from torchscout.experts.coverage import Rows
from torchscout.mesh import LayerKind
from torchscout.replay.capture.invocation import RowResize
from torchscout.replay.compiled import CompiledCode
from torchscout.replay.recipe import SavedInput
from torchscout.replay.recipes.layer import LayerRecipe, LayerReplay
from torchscout.replay.sharded_parameters import ParameterGatherers

__all__ = ["ExpertsRecipe"]


class ExpertsRecipe(LayerRecipe):
    """Every expert module at every shape: the first shape of each module, then the second of each."""

    is_dynamic = True

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        shapes: Mapping[str, Sequence[Rows]],
        surfaces: Mapping[torch.Tensor, Surface],
        device: torch.device,
        gatherers: Callable[[nn.Module], ParameterGatherers] = lambda _: ParameterGatherers(),
        compiled: CompiledCode | None = None,
    ) -> None:
        """A module without ``shapes`` is replayed as it was called."""
        super().__init__("experts", modules, surfaces, device, gatherers, LayerKind.EXPERT, compiled)
        chosen: dict[str, Sequence[Rows | None]] = {name: shapes.get(name) or [None] for name in modules}
        most = max(map(len, chosen.values()), default=0)
        self._turns: list[tuple[int, Rows | None]] = [
            (place, of_module[turn])
            for turn in range(most)
            for place, of_module in enumerate(chosen.values())
            if turn < len(of_module)
        ]
        self.targets = tuple(_target_name(self._layers[place].name, rows) for place, rows in self._turns)

    def saved_name(self, target: int) -> str:
        """All shapes of a module are made from one call."""
        return self._layers[self._turns[target][0]].name

    def new_replay(self, target: int, is_source: bool, saved: SavedInput | None, /) -> LayerReplay:
        place, rows = self._turns[target]
        replay = super().new_replay(place, is_source, saved)
        replay.resize = None if rows is None else RowResize(rows)
        return replay


def _target_name(name: str, rows: Rows | None) -> str:
    if rows is None:
        return name
    counts = str(rows[0]) if len(set(rows)) == 1 else ",".join(map(str, rows))
    return f"{name} x{counts}"
