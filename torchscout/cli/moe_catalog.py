"""Makes catalogs of shapes for the small mixture of experts, by executing them (paper, section 6.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from torchscout.cli.moe_model import EXPERTS, LAYERS, WIDTH, Experts, experts_at
from torchscout.experts.catalog import Catalog, Places, save
from torchscout.experts.coverage import Profiler, tabulated, uniform
from torchscout.experts.discovery import discover
from torchscout.experts.launch_profiler import LaunchProfiler

__all__ = ["catalog_for", "save_catalog"]


def catalog_for(spread: int, counts: Sequence[int], path: Path, *, device: str = "cpu") -> None:
    """Of the shapes in which every expert has as many rows, for all layers; nothing of it is compressed.

    ``spread`` ranks share the experts of one replica.
    """
    torch.manual_seed(0)
    profiler = LaunchProfiler(Experts(EXPERTS // spread), WIDTH, device=device, grouped=True)
    save_catalog({"experts": profiler}, spread, counts, path)


def save_catalog(
    profilers: Mapping[str, Profiler], spread: int, counts: Sequence[int], path: Path, layers: int = LAYERS
) -> None:
    """``profilers`` of all projections, by name."""
    held = EXPERTS // spread
    shapes, words = [uniform(count, held) for count in counts], f"rows {counts}"
    tables = [
        tabulated(name, profiler.facts(), words, discover(profiler, shapes))
        for name, profiler in profilers.items()
    ]
    names = tuple(experts_at(layer) for layer in range(layers))
    save(Catalog(tuple(tables), (Places(names, held, spread, tuple(range(len(tables)))),)), path)
