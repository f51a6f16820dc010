"""Records names and launches of kernels whose paths cannot be counted (paper, section 6.2).

For expert layers made of any operations. A closed kernel does not count its paths, so every shape is
retained. ``facts_of`` returns the facts that a catalog of an expert module is bound to, without running the
module.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from torchscout.experts.catalog import device_facts
from torchscout.experts.coverage import Rows, ShapeProfile
from torchscout.experts.kernel.expert_layer import Experts

__all__ = ["KernelLaunch", "LaunchProfiler", "closed_facts", "facts_of"]


def facts_of(module: nn.Module, device: torch.device, regime: str = "pressure") -> list[dict[str, str]]:
    """Return the facts of each projection if its kernel counts paths, else those of the whole module."""
    if not isinstance(module, Experts):
        return [closed_facts(module, device)]
    from torchscout.experts.kernel.profiler import kernel_facts

    found = []
    for weights in (module.up, module.down):
        experts, hidden, intermediate = weights.shape
        found.append(kernel_facts(module.gemm(hidden, intermediate, device), experts, device, regime))
    return found


def closed_facts(module: nn.Module, device: torch.device) -> dict[str, str]:
    """Return the facts of a module with closed kernels: its class and its parameters."""
    kind = type(module)
    parameters = [
        f"{name} {'x'.join(map(str, each.shape))} {str(each.dtype).removeprefix('torch.')}"
        for name, each in module.named_parameters()
    ]
    return {
        **device_facts(device),
        "kernel": f"closed, {kind.__module__}.{kind.__qualname__}",
        "parameters": ", ".join(parameters),
    }


class KernelLaunch(NamedTuple):
    """One kernel on the device."""

    name: str
    block: tuple[int, ...]
    grid: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} block {'x'.join(map(str, self.block))} grid {'x'.join(map(str, self.grid))}"


class LaunchProfiler:
    """Executes a module for each expert in turn or, if ``grouped``, for all experts at once."""

    def __init__(
        self, expert: nn.Module, hidden: int, *, device: torch.device | str = "cuda", grouped: bool = False
    ) -> None:
        """A ``grouped`` module takes all rows, sorted by expert, and a tensor of their numbers."""
        self._device = torch.device(device)
        self._expert = expert.to(self._device)
        self._hidden, self._is_grouped = hidden, grouped
        self._dtype = next(expert.parameters()).dtype
        self.reason = ""
        """Why the last ``profile`` was None."""

    def facts(self) -> dict[str, str]:
        return closed_facts(self._expert, self._device)

    def profile(self, rows: Rows) -> ShapeProfile | None:
        """Execute this shape, set ``reason`` to the kernels that ran, and return None."""
        launches = "; ".join(map(str, self.launches(rows)))
        ran = launches or f"on the {self._device.type}, where launches are not recorded"
        self.reason = f"closed kernels do not count their paths: {ran}"
        return None

    def launches(self, rows: Rows) -> list[KernelLaunch]:
        """Return the kernels of one forward and backward pass, in order of their start."""
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
        for x, *counts in calls:
            out = self._expert(x, *counts)
            torch.autograd.grad(out, [x, *self._expert.parameters()], torch.ones_like(out))
