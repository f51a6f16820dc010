"""A profiler that multiplies matrices tile by tile on the CPU and counts the tiles as it goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from torchscout.experts.coverage import Rows, ShapeProfile

LOADS = {"forward": ("forward/last_tile", "forward/following_tile")}
"""Every tile of the product is one of these."""


@dataclass
class TiledMatmul:
    """``x @ w`` for each expert; programs take the tiles in turn, as those of a persistent kernel do."""

    inner: int = 3
    outer: int = 2
    experts: int = 1
    tile: int = 4
    step: int = 2
    """Rows that one step of the weight gradient's reduction takes."""
    programs: int = 3
    coupled: bool = False
    """Whether a tail takes another path after a full expert, so that paths do not add up."""
    switch: int | None = None
    """Rows above which another kernel would be taken."""
    uncountable: frozenset[Rows] = frozenset()
    unstable: frozenset[Rows] = frozenset()
    reason: str = "the tiles were not counted"
    executed: list[Rows] = field(default_factory=list)

    def facts(self) -> dict[str, str]:
        return {
            "device": "cpu",
            "torch": torch.__version__,
            "tile": str(self.tile),
            "inner": str(self.inner),
            "outer": str(self.outer),
            "experts": str(self.experts),
        }

    def profile(self, rows: Rows) -> ShapeProfile | None:
        assert len(rows) == self.experts
        self.executed.append(rows)
        if rows in self.uncountable:
            return None
        counts: Counter[str] = Counter()
        taken = [0] * self.programs
        for before, count in zip((0, *rows), rows, strict=False):
            self._expert(count, before, counts, taken)
        counts["forward/last_tile"] = sum(tiles > 0 for tiles in taken)
        counts["forward/following_tile"] = sum(taken) - counts["forward/last_tile"]
        counts["forward/waves"] = max(taken)
        if rows in self.unstable and self.executed.count(rows) == 2:
            counts["forward/interior"] += 1
        size = "" if self.switch is None or sum(rows) <= self.switch else " for many rows"
        return ShapeProfile.of(("full" if all(taken) else "idle") + size, counts)

    def _expert(self, rows: int, before: int, counts: Counter[str], taken: list[int]) -> None:
        x, w = torch.randn(rows, self.inner), torch.randn(self.inner, self.outer)
        y, gradient = torch.empty(rows, self.outer), torch.zeros(self.inner, self.outer)
        if not rows:
            counts["forward/empty"] += 1
        for start in range(0, rows, self.tile):
            tile = slice(start, start + self.tile)
            y[tile] = x[tile] @ w
            counts[self._role(len(y[tile]), before)] += 1
            taken[sum(taken) % self.programs] += 1
        for start in range(0, rows, self.step):
            piece = slice(start, start + self.step)
            gradient += x[piece].T @ y[piece]
            full = len(x[piece]) == self.step
            counts["weight_gradient/full_step" if full else "weight_gradient/tail_step"] += 1
        torch.testing.assert_close(y, x @ w)
        torch.testing.assert_close(gradient, x.T @ y)

    def _role(self, height: int, before: int) -> str:
        if height == self.tile:
            return "forward/interior"
        if self.coupled and before and not before % self.tile:
            return "forward/interior"
        return "forward/tail_low" if 2 * height <= self.tile else "forward/tail_high"
