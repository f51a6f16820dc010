"""Finds the adapter for a job (paper, section 9)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchscout.config import Parallelism
from torchscout.integration.adapter import Adapter
from torchscout.integration.pytorch import PyTorchAdapter
from torchscout.mesh import Mesh

__all__ = ["adapter_for"]


def adapter_for(
    model: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    parallelism: Mesh | DeviceMesh | Parallelism | None,
) -> Adapter:
    """The adapter whose framework made this model; plain PyTorch is every other's fallback.

    A framework that was never imported made none, and is not imported here.
    """
    if _is_one_of(model, "Trainer", ("torchtitan.trainer", "torchtitan.train")):
        return _torchtitan(model, optimizer, parallelism)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "several pipeline stages of one rank go into a torch.nn.ModuleList"
        )
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


def _torchtitan(trainer: Any, optimizer: Any, parallelism: Any) -> Adapter:
    import torchtitan

    if not torchtitan.__version__.startswith(("0.3.", "0.0.0")):  # a source tree does not know its release
        raise ValueError(f"TorchTitan {torchtitan.__version__} is not supported; 0.3 is")
    if optimizer is not None or parallelism is not None:
        raise ValueError("a Trainer knows its optimizers and its parallelism; pass the Trainer alone")
    from torchscout.integration.torchtitan import TorchTitanAdapter

    return TorchTitanAdapter(trainer)


def _is_one_of(job: Any, name: str, modules: Sequence[str]) -> bool:
    kinds = [getattr(sys.modules.get(each), name, None) for each in modules]
    return any(isinstance(kind, type) and isinstance(job, kind) for kind in kinds)
