"""What can be seen of kernels whose paths cannot be counted: their names and launches (paper, section 6.2).

For expert layers of any operations. A closed kernel does not say what its tiles do, so there are no path
counts and compression is off; to cover by launch geometry alone must be asked for, and is to be had on CUDA.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from torchscout.evidence.catalog.facts import closed_facts
from torchscout.evidence.catalog.profile import Rows, ShapeProfile

__all__ = ["KernelLaunch", "LaunchProfiler"]


class KernelLaunch(NamedTuple):
    """One kernel on the device."""

    name: str
    block: tuple[int, ...]
    grid: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} block {'x'.join(map(str, self.block))} grid {'x'.join(map(str, self.grid))}"


class LaunchProfiler:
    """Executes a module for the rows of each expert in turn, or where it is ``grouped`` for all at once."""

    def __init__(
        self,
        expert: nn.Module,
        hidden: int,
        *,
        device: torch.device | str = "cuda",
        grouped: bool = False,
        geometry_only: bool = False,
    ) -> None:
        """A ``grouped`` module takes all rows, sorted by expert, and a tensor of how many are whose."""
        self._device = torch.device(device)
        if geometry_only and self._device.type != "cuda":
            raise ValueError(f"launches are recorded on CUDA, got device={str(device)!r}")
        self._expert = expert.to(self._device)
        self._hidden, self._is_grouped = hidden, grouped
        self._geometry_only = geometry_only
        self._dtype = next(expert.parameters()).dtype
        self.reason = ""
        """Why the last profile was None."""

    def facts(self) -> dict[str, str]:
        facts = closed_facts(self._expert, self._device)
        return {**facts, "cover": "launch geometry only"} if self._geometry_only else facts

    def profile(self, rows: Rows) -> ShapeProfile | None:
        """None, and ``reason`` names what ran, unless launch geometry was asked for."""
        launches = self.launches(rows)
        if not self._geometry_only:
            ran = "; ".join(map(str, launches)) or f"on the {self._device.type}, where they are not seen"
            self.reason = f"closed kernels do not count their paths: {ran}"
            return None
        kernels = sorted({f"{launch.name} block {launch.block}" for launch in launches})
        blocks: Counter[str] = Counter()
        for launch in launches:
            blocks[f"{launch.name}/launches"] += 1
            blocks[f"{launch.name}/blocks"] += _product(launch.grid)
        return ShapeProfile("launch geometry only: " + "; ".join(kernels), tuple(sorted(blocks.items())))

    def launches(self, rows: Rows) -> list[KernelLaunch]:
        """The kernels of one forward and backward, in the order in which they began."""
        calls = self._calls(rows)
        if self._device.type != "cuda":
            self._execute(calls)
            return []
        torch.cuda.synchronize(self._device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            self._execute(calls)
            torch.cuda.synchronize(self._device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        kernels = sorted(
            (each for each in events if each.get("cat") == "kernel"), key=lambda each: each["ts"]
        )
        return [
            KernelLaunch(each["name"], tuple(each["args"]["block"]), tuple(each["args"]["grid"]))
            for each in kernels
        ]

    def _calls(self, rows: Rows) -> list[tuple[torch.Tensor, ...]]:
        counts = [sum(rows)] if self._is_grouped else [*rows]
        given = [
            torch.randn(count, self._hidden, device=self._device, dtype=self._dtype, requires_grad=True)
            for count in counts
        ]
        if self._is_grouped:
            return [(given[0], torch.tensor(rows, device=self._device))]
        return [(each,) for each in given]

    def _execute(self, calls: list[tuple[torch.Tensor, ...]]) -> None:
        for x, *others in calls:
            out = self._expert(x, *others)
            torch.autograd.grad(out, [x, *self._expert.parameters()], torch.ones_like(out))


def _product(grid: tuple[int, ...]) -> int:
    blocks = 1
    for length in grid:
        blocks *= length
    return blocks
