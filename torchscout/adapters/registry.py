"""Finds the adapter for a job (paper, section 9).

Others bring their own: a package with an entry point in the group ``torchscout.adapters`` whose name is the
module that a job of theirs has imported, and whose object is its ``adapter_of``; see docs/frameworks/own.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchscout.adapters.base import Adapter
from torchscout.adapters.pytorch import PyTorchAdapter
from torchscout.config import Parallelism
from torchscout.errors import ScoutError
from torchscout.mesh import Mesh

__all__ = ["GROUP", "adapter_for"]

AdapterOf = Callable[[Any, Any, Mesh | DeviceMesh | Parallelism | None], Adapter | None]
"""The adapter, if the model is one of this framework's; None if it is not."""

GROUP = "torchscout.adapters"
_FRAMEWORKS = {
    "deepspeed": "torchscout.adapters.deepspeed",
    "megatron.core.optimizer": "torchscout.adapters.megatron.adapter",
    "torchtitan.trainer": "torchscout.adapters.torchtitan",
    "lightning.fabric.wrappers": "torchscout.adapters.fabric",
    "accelerate.optimizer": "torchscout.adapters.accelerate",  # last: it wraps DeepSpeed's optimizers too
}
"""What a job has imported that uses a framework, and which module then tells whether a model is its own."""


def adapter_for(model: Any, optimizer: Any, parallelism: Mesh | DeviceMesh | Parallelism | None) -> Adapter:
    """The adapter whose framework made this model; plain PyTorch is every other's fallback."""
    for adapter_of in (*_brought(), *_shipped()):
        if (found := adapter_of(model, optimizer, parallelism)) is not None:
            return _whole(found)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "several pipeline stages of one rank go into a torch.nn.ModuleList"
        )
    optimizers = _listed(optimizer)
    if wrong := [type(each).__name__ for each in optimizers if not isinstance(each, torch.optim.Optimizer)]:
        raise ValueError(f"optimizer must be a torch.optim.Optimizer or several, got {', '.join(wrong)}")
    return PyTorchAdapter(model, optimizers, parallelism)


def _brought() -> Iterator[AdapterOf]:
    """Those of other packages, which come first: who installs one for a framework wants that one."""
    for each in entry_points(group=GROUP):
        if each.name in sys.modules:
            try:
                yield each.load()
            except (ImportError, AttributeError) as error:
                package = each.dist.name if each.dist is not None else "an unknown package"
                what = f"the adapter {each.value} that {package} brings for {each.name}"
                raise ScoutError(f"{what} cannot be loaded: {error}") from error


def _shipped() -> Iterator[AdapterOf]:
    for framework, module in _FRAMEWORKS.items():
        if framework in sys.modules:
            try:
                yield import_module(module).adapter_of
            except ImportError as error:
                raise ScoutError(
                    f"this version of {framework} is not one that torchscout knows: {error}"
                ) from error


def _whole(adapter: Adapter) -> Adapter:
    """A part that is missing would show in the middle of attaching, on some ranks first."""
    asked = [name for name in vars(Adapter) if not name.startswith("_")]
    if missing := [name for name in asked if not hasattr(type(adapter), name)]:
        kind = f"{type(adapter).__module__}.{type(adapter).__qualname__}"
        raise ScoutError(f"{kind} is no adapter, it lacks {', '.join(missing)}")
    return adapter


def _listed(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> Sequence[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
