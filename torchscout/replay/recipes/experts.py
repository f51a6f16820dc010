"""Replays experts at the shapes of a catalog (paper, section 6.2).

Routing decides how many rows an expert receives, and a fault may show only at certain numbers of rows. So
each check takes the next representative shapes, and fills them with rows that were captured in this step.
Layers with equal experts run the same kernels at a shape, so one of them represents all of them, another one
in each check. Without a catalog, experts are replayed as training called them. The router is a dense layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch
from torch import nn

from torchscout.decision.types import Surface
from torchscout.experts.coverage import Rows
from torchscout.mesh import LayerKind
from torchscout.replay.capture.hooks import CallCapture
from torchscout.replay.capture.invocation import RowResize
from torchscout.replay.compiled import CompiledCode
from torchscout.replay.recipe import SWEPT_TOGETHER, SavedInput
from torchscout.replay.recipes.layer import LayerRecipe, LayerReplay
from torchscout.replay.schedule import Alike, Order, PathOrder
from torchscout.replay.sharded_parameters import ParameterGatherers

__all__ = ["ExpertsRecipe"]


class ExpertsRecipe(LayerRecipe):
    """Every shape of every set of modules that are alike; ``PathOrder`` has the order."""

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
        sets: dict[Hashable, list[int]] = {}
        for place, (name, module) in enumerate(modules.items()):
            alike = _kernels_of(module, shapes[name]) if shapes.get(name) else place
            sets.setdefault(alike, []).append(place)
        rows: list[Sequence[Rows | None]] = [
            shapes.get(self._layers[places[0]].name) or [None] for places in sets.values()
        ]
        self._pairs: list[tuple[int, Rows | None, int]] = [
            (place, shape, places[0])
            for places, of_set in zip(sets.values(), rows, strict=True)
            for shape in of_set
            for place in places
        ]
        """The module and the shape of each target, and the first module that is like this one."""
        self._order = PathOrder(
            [Alike(len(places), len(of_set)) for places, of_set in zip(sets.values(), rows, strict=True)]
        )
        self.paths = sum(len(of_set) for of_set in rows if of_set[0] is not None)
        """The shapes of a catalog, counted once for modules that are alike; 0 without a catalog."""
        self.targets = tuple(_target_name(self._layers[place].name, shape) for place, shape, _ in self._pairs)
        self._captures: dict[int, CallCapture] = {}
        """The newest capture of each module, which all its shapes in one check share."""

    @property
    def order(self) -> Order:
        return self._order

    def swept(self) -> Sequence[int]:
        """Every path and every module: another module at the same path runs the same kernels."""
        return self._order.every()

    def swept_bytes(self, target: int) -> int:  # noqa: ARG002
        return SWEPT_TOGETHER  # its shape may be larger than that of the saved call

    def saved_name(self, target: int) -> str:
        """One call serves all shapes of all modules that are alike."""
        return self._layers[self._pairs[target][2]].name

    def new_replay(self, target: int, is_source: bool, saved: SavedInput | None, /) -> LayerReplay:
        place, rows, _ = self._pairs[target]
        replay = super().new_replay(place, is_source, saved)
        replay.resize = None if rows is None else RowResize(rows)
        if isinstance(replay.capture, CallCapture):
            self._captures[place] = replay.capture
        return replay

    def capture_in_use(self, place: int) -> CallCapture | None:
        capture = self._captures.get(place)
        return capture if capture is not None and capture.is_armed else None


def _kernels_of(module: nn.Module, shapes: Iterable[Rows]) -> Hashable:
    """What decides which kernels a module runs, and at which shapes."""
    classes = tuple((path, type(each)) for path, each in module.named_modules())
    parameters = tuple((path, each.shape, each.dtype) for path, each in module.named_parameters())
    return classes, parameters, tuple(shapes)


def _target_name(name: str, rows: Rows | None) -> str:
    if rows is None:
        return name
    counts = str(rows[0]) if len(set(rows)) == 1 else ",".join(map(str, rows))
    return f"{name} x{counts}"
