"""The expected results and counts of a grouped GEMM, computed from the shape alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

PASSES = ("forward", "input_gradient", "weight_gradient")


class Tile(NamedTuple):
    expert: int
    bottom: int
    """Its last row, of the expert's own."""
    right: int
    role: str
    steps: int
    tail_steps: int


def tiles_of(which: str, rows: tuple[int, ...], hidden: int, intermediate: int, tiling) -> Iterator[Tile]:
    for expert, count in enumerate(rows):
        height, width, length = {
            "forward": (count, intermediate, hidden),
            "input_gradient": (count, hidden, intermediate),
            "weight_gradient": (hidden, intermediate, count),
        }[which]
        for top in range(0, height, tiling.rows):
            for left in range(0, width, tiling.columns):
                bottom, right = min(height, top + tiling.rows), min(width, left + tiling.columns)
                role = role_of(bottom - top, right - left, tiling) if length else "empty"
                yield Tile(
                    expert,
                    bottom - 1,
                    right - 1,
                    role,
                    length // tiling.step,
                    int(length % tiling.step > 0),
                )


def role_of(height: int, width: int, tiling) -> str:
    cut = height < tiling.rows
    half = "low" if height < tiling.rows / 2 else "high"
    if width < tiling.columns:
        return f"corner_{half}" if cut else "column_tail"
    return f"row_tail_{half}" if cut else "interior"


def counts_of(
    rows: tuple[int, ...], hidden: int, intermediate: int, tilings, programs: int
) -> dict[str, int]:
    """Return how often each path runs; ``tilings`` by pass, or one for all."""
    counts: Counter[str] = Counter()
    for which in PASSES:
        tiling = tilings[which] if isinstance(tilings, dict) else tilings
        tiles = list(tiles_of(which, rows, hidden, intermediate, tiling))
        for tile in tiles:
            counts[f"{which}/{tile.role}"] += 1
            counts[f"{which}/step_full"] += tile.steps
            counts[f"{which}/step_tail"] += tile.tail_steps
        if which != "weight_gradient":
            counts[f"{which}/empty"] += rows.count(0)
        turns = [len(tiles[program::programs]) for program in range(programs)]
        counts[f"{which}/last_tile"] = sum(turn > 0 for turn in turns)
        counts[f"{which}/following_tile"] = sum(turn - 1 for turn in turns if turn)
        counts[f"{which}/waves"] = max(turns)
    return {path: count for path, count in sorted(counts.items()) if count}


def reference(
    x: torch.Tensor, weights: torch.Tensor, gradient: torch.Tensor, rows: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Return the three results in float32."""
    by_expert = zip(x.float().split(rows), weights.float(), gradient.float().split(rows), strict=True)
    forward, inputs, weight = [], [], []
    for mine, matrix, above in by_expert:
        forward.append(mine @ matrix)
        inputs.append(above @ matrix.T)
        weight.append(mine.T @ above)
    return {
        "forward": torch.cat(forward),
        "input_gradient": torch.cat(inputs),
        "weight_gradient": torch.stack(weight),
    }


def worst_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the error relative to the largest element; infinite where anything is not finite."""
    if not result.numel():
        return 0.0
    if not torch.isfinite(result).all():
        return float("inf")
    scale = expected.abs().max().clamp(min=1e-30)
    return float((result.float() - expected).abs().max() / scale)
