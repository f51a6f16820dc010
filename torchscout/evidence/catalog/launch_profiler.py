"""What can be seen of kernels whose paths cannot be counted: their names and launches (paper, section 6.2).

For expert layers of plain torch operations on CUDA. A closed kernel does not say what its tiles do, so there
are no path counts and compression is off; to cover by launch geometry alone must be asked for.
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

from torchscout.evidence.catalog.device_facts import device_facts
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
    """Executes the same module for the rows of each expert, as training without grouped kernels does."""

    def __init__(
        self,
        expert: nn.Module,
        hidden: int,
        *,
        device: torch.device | str = "cuda",
        geometry_only: bool = False,
    ) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda":
            raise ValueError(f"launches are recorded on CUDA, got device={str(device)!r}")
        self._expert = expert.to(self._device)
        self._hidden = hidden
        self._geometry_only = geometry_only
        self._dtype = next(expert.parameters()).dtype
        self.reason = ""
        """Why the last profile was None."""

    def facts(self) -> dict[str, str]:
        return {
            **device_facts(self._device),
            "kernel": "closed, launch geometry only" if self._geometry_only else "closed",
            "hidden": str(self._hidden),
            "expert": str(self._expert),
            "dtype": str(self._dtype),
        }

    def profile(self, rows: Rows) -> ShapeProfile | None:
        """None, and ``reason`` names what ran, unless launch geometry was asked for."""
        launches = self.launches(rows)
        if not self._geometry_only:
            self.reason = f"closed kernels do not count their paths: {'; '.join(map(str, launches))}"
            return None
        kernels = sorted({f"{launch.name} block {launch.block}" for launch in launches})
        blocks: Counter[str] = Counter()
        for launch in launches:
            blocks[f"{launch.name}/launches"] += 1
            blocks[f"{launch.name}/blocks"] += _product(launch.grid)
        return ShapeProfile("launch geometry only: " + "; ".join(kernels), tuple(sorted(blocks.items())))

    def launches(self, rows: Rows) -> list[KernelLaunch]:
        """The kernels of one forward and backward, in the order in which they began."""
        inputs = [
            torch.randn(count, self._hidden, device=self._device, dtype=self._dtype, requires_grad=True)
            for count in rows
        ]
        torch.cuda.synchronize(self._device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            for x in inputs:
                out = self._expert(x)
                torch.autograd.grad(out, [x, *self._expert.parameters()], torch.ones_like(out))
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


def _product(grid: tuple[int, ...]) -> int:
    blocks = 1
    for length in grid:
        blocks *= length
    return blocks
