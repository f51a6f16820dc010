"""Finds the adapter for a job (paper, section 9)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchscout.config import Parallelism
from torchscout.integration.adapter import Adapter
from torchscout.integration.pytorch import PyTorchAdapter
from torchscout.mesh import Mesh

__all__ = ["adapter_for"]


def adapter_for(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    parallelism: Mesh | DeviceMesh | Parallelism | None,
) -> Adapter:
    """The adapter whose framework made this model; plain PyTorch is every other's fallback."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "several pipeline stages of one rank go into a torch.nn.ModuleList"
        )
    if (deepspeed := sys.modules.get("deepspeed")) and isinstance(model, deepspeed.DeepSpeedEngine):
        from torchscout.integration.deepspeed import DeepSpeedAdapter  # only where its framework is

        return DeepSpeedAdapter(model, parallelism)
    optimizers = _listed(optimizer)
    if wrong := [type(each).__name__ for each in optimizers if not isinstance(each, torch.optim.Optimizer)]:
        raise ValueError(f"optimizer must be a torch.optim.Optimizer or several, got {', '.join(wrong)}")
    return PyTorchAdapter(model, optimizers, parallelism)


def _listed(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> Sequence[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
