"""Finds the adapter for a job (paper, section 9)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchscout.config import Parallelism
from torchscout.errors import ScoutError
from torchscout.integration.adapter import Adapter
from torchscout.integration.pytorch import PyTorchAdapter
from torchscout.mesh import Mesh

__all__ = ["adapter_for"]

_FRAMEWORKS = {
    "deepspeed": "torchscout.integration.deepspeed",
    "megatron.core.optimizer": "torchscout.integration.megatron",
    "torchtitan.trainer": "torchscout.integration.torchtitan",
}
"""What a job has imported that uses a framework, and which module then tells whether a model is its own."""


def adapter_for(model: Any, optimizer: Any, parallelism: Mesh | DeviceMesh | Parallelism | None) -> Adapter:
    """The adapter whose framework made this model; plain PyTorch is every other's fallback."""
    for framework, module in _FRAMEWORKS.items():
        if framework in sys.modules:
            found = _adapter_in(module, framework).adapter_of(model, optimizer, parallelism)
            if found is not None:
                return found  # type: ignore[no-any-return]
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "several pipeline stages of one rank go into a torch.nn.ModuleList"
        )
    optimizers = _listed(optimizer)
    if wrong := [type(each).__name__ for each in optimizers if not isinstance(each, torch.optim.Optimizer)]:
        raise ValueError(f"optimizer must be a torch.optim.Optimizer or several, got {', '.join(wrong)}")
    return PyTorchAdapter(model, optimizers, parallelism)


def _adapter_in(module: str, framework: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ScoutError(f"this version of {framework} is not one that torchscout knows: {error}") from error


def _listed(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> Sequence[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
