"""Finds the adapter for a job (paper, section 9).

Other packages can provide adapters by an entry point in the group ``torchscout.adapters``. Its name is the
module that jobs of the framework import, and its object is an ``AdapterOf``; see docs/frameworks/own.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
"""Given model, optimizer and parallelism: the adapter, or None if the model is not of this framework."""

GROUP = "torchscout.adapters"
_FRAMEWORKS = {
    "deepspeed": "torchscout.adapters.deepspeed",
    "megatron.core.optimizer": "torchscout.adapters.megatron.adapter",
    "torchtitan.trainer": "torchscout.adapters.torchtitan",
    "lightning.fabric.wrappers": "torchscout.adapters.fabric",
    "accelerate.optimizer": "torchscout.adapters.accelerate",  # last: it wraps DeepSpeed's optimizers too
}
"""The module that jobs of a framework have imported, and the module of its adapter."""


def adapter_for(model: Any, optimizer: Any, parallelism: Mesh | DeviceMesh | Parallelism | None) -> Adapter:
    """Return the adapter of the framework that made this model, or the one for plain PyTorch.

    Raises ``ValueError`` for a model or optimizer that no adapter knows, and ``ScoutError`` for an adapter
    that cannot be loaded.
    """
    for adapter_of in (*_installed(), *_shipped()):
        if (found := adapter_of(model, optimizer, parallelism)) is not None:
            return _complete(found)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "several pipeline stages of one rank go into a torch.nn.ModuleList"
        )
    optimizers = (
        [optimizer]
        if isinstance(optimizer, torch.optim.Optimizer)
        else []
        if optimizer is None
        else [*optimizer]
    )
    if wrong := [type(each).__name__ for each in optimizers if not isinstance(each, torch.optim.Optimizer)]:
        raise ValueError(f"optimizer must be a torch.optim.Optimizer or several, got {', '.join(wrong)}")
    return PyTorchAdapter(model, optimizers, parallelism)


def _installed() -> Iterator[AdapterOf]:
    """The adapters of other packages. They come first: installing one means to use it."""
    for each in entry_points(group=GROUP):
        if each.name in sys.modules:
            try:
                yield each.load()
            except (ImportError, AttributeError) as error:
                package = each.dist.name if each.dist is not None else "an unknown package"
                adapter = f"the adapter {each.value} for {each.name} from {package}"
                raise ScoutError(f"{adapter} cannot be loaded: {error}") from error


def _shipped() -> Iterator[AdapterOf]:
    for framework, module in _FRAMEWORKS.items():
        if framework in sys.modules:
            try:
                yield import_module(module).adapter_of
            except ImportError as error:
                raise ScoutError(f"torchscout does not know this version of {framework}: {error}") from error


def _complete(adapter: Adapter) -> Adapter:
    """Require all methods now: a missing one would fail while attaching, on some ranks before others."""
    required = [name for name in vars(Adapter) if not name.startswith("_")]
    if missing := [name for name in required if not hasattr(type(adapter), name)]:
        kind = f"{type(adapter).__module__}.{type(adapter).__qualname__}"
        raise ScoutError(f"{kind} is not an adapter: it lacks {', '.join(missing)}")
    return adapter
