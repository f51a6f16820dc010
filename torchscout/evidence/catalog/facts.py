"""What a catalog must have been made under to hold for an expert module, without running it (section 6.2).

The same words in which profilers speak of what they execute. Nothing is decided here.
"""

from __future__ import annotations

import torch
from torch import nn

from torchscout.evidence.catalog.device_facts import device_facts
from torchscout.evidence.catalog.experts import Experts

__all__ = ["closed_facts", "facts_of"]


def facts_of(module: nn.Module, device: torch.device, regime: str = "pressure") -> list[dict[str, str]]:
    """Those of each projection, where its kernel counts its paths; else of the module as a whole."""
    if not isinstance(module, Experts):
        return [closed_facts(module, device)]
    from torchscout.evidence.catalog.kernel_profiler import kernel_facts

    found = []
    for weights in (module.up, module.down):
        experts, hidden, intermediate = weights.shape
        found.append(kernel_facts(module.gemm(hidden, intermediate, device), experts, device, regime))
    return found


def closed_facts(module: nn.Module, device: torch.device) -> dict[str, str]:
    """Of a module whose kernels do not say what they do: its code by name, and the form of what it holds."""
    kind = type(module)
    held = [
        f"{name} {'x'.join(map(str, each.shape))} {str(each.dtype).removeprefix('torch.')}"
        for name, each in module.named_parameters()
    ]
    return {
        **device_facts(device),
        "kernel": f"closed, {kind.__module__}.{kind.__qualname__}",
        "parameters": ", ".join(held),
    }
