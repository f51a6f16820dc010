"""Finds the adapter for a job (paper, section 9).

Other packages can provide adapters by an entry point in the group ``torchscout.adapters``. Its name is the
module that jobs of the framework import, and its object is an ``AdapterOf``; see docs/frameworks/own.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, version
from itertools import chain
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchscout.adapters.base import Adapter
from torchscout.adapters.pytorch import NoModelAdapter, PyTorchAdapter
from torchscout.adapters.versions import advice
from torchscout.config import Parallelism
from torchscout.errors import ScoutError
from torchscout.mesh import Mesh

__all__ = ["GROUP", "adapter_for"]

AdapterOf = Callable[[Any, Any, Mesh | DeviceMesh | Parallelism | None], Adapter | None]
"""Given model, optimizer and parallelism: the adapter, or None if the model is not of this framework."""

GROUP = "torchscout.adapters"
_FRAMEWORKS = {
    "deepspeed": ("deepspeed", "torchscout.adapters.deepspeed"),
    "megatron.core.optimizer": ("megatron-core", "torchscout.adapters.megatron.adapter"),
    "torchtitan.trainer": ("torchtitan", "torchscout.adapters.torchtitan"),
    "lightning.fabric.wrappers": ("lightning", "torchscout.adapters.fabric"),
    # Last: it wraps DeepSpeed's optimizers too.
    "accelerate.optimizer": ("accelerate", "torchscout.adapters.accelerate"),
}
"""The module that jobs of a framework have imported; the distribution, and the module of its adapter."""


def adapter_for(model: Any, optimizer: Any, parallelism: Mesh | DeviceMesh | Parallelism | None) -> Adapter:
    """Return the adapter of the framework that made this model, or the one for plain PyTorch. Without a model
    and an optimizer, only hangs can be localized.

    Raises ``ValueError`` for a model or optimizer that no adapter knows, and ``ScoutError`` for an adapter
    that cannot be loaded.
    """
    if model is None and optimizer is None:
        return NoModelAdapter()
    for adapter_of in chain(_installed(), _shipped([*_parts_of(model), *_parts_of(optimizer)])):
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
    # ``entry_points`` would parse those of all packages, which takes three times as long.
    listed = (each for each in distributions() if GROUP in (each.read_text("entry_points.txt") or ""))
    for each in (entry for package in listed for entry in package.entry_points.select(group=GROUP)):
        if each.name in sys.modules:
            try:
                yield each.load()
            except (ImportError, AttributeError) as error:
                package = each.dist.name if each.dist is not None else "an unknown package"
                adapter = f"the adapter {each.value} for {each.name} from {package}"
                raise ScoutError(f"{adapter} cannot be loaded: {error}") from error


def _shipped(job: Sequence[Any]) -> Iterator[AdapterOf]:
    for framework, (distribution, module) in _FRAMEWORKS.items():
        if framework in sys.modules:
            try:
                yield import_module(module).adapter_of
            except ImportError as error:
                if _is_of(framework.rpartition(".")[0] or framework, job):
                    raise ScoutError(
                        f"torchscout cannot be attached to {distribution} {_version(distribution)}: {error}; "
                        f"{advice(distribution)}"
                    ) from error


def _parts_of(given: Any) -> Sequence[Any]:
    return [*given] if isinstance(given, list | tuple | torch.nn.ModuleList) else [given]


def _is_of(package: str, job: Sequence[Any]) -> bool:
    """Whether a model or an optimizer of the job is of this package; other jobs may only have imported it."""
    classes = (each for part in job for each in type(part).__mro__)
    return any(f"{each.__module__}.".startswith(f"{package}.") for each in classes)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(from a source tree)"


def _complete(adapter: Adapter) -> Adapter:
    """Require all methods now: a missing one would fail while attaching, on some ranks before others."""
    required = [name for name in vars(Adapter) if not name.startswith("_")]
    if missing := [name for name in required if not hasattr(type(adapter), name)]:
        kind = f"{type(adapter).__module__}.{type(adapter).__qualname__}"
        raise ScoutError(f"{kind} is not an adapter: it lacks {', '.join(missing)}")
    return adapter
