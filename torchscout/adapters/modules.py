"""Properties of a single module, seen through its wrappers (paper, section 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

__all__ = [
    "CALLED_AS_ONE",
    "CONTAINERS",
    "WRAPPERS",
    "is_called",
    "is_matrix",
    "is_plain",
    "is_table",
    "kind_of",
    "rows_of",
    "shape_of",
    "stages_of",
    "unwrapped",
    "without_hooks",
    "wrapped",
]

CALLED_AS_ONE = ("_orig_mod", "_checkpoint_wrapped_module")
"""Wrappers that compile or recompute: replay must call the wrapper, never the module inside."""
WRAPPERS = (*CALLED_AS_ONE, "_fsdp_wrapped_module")
"""The attribute names under which wrappers hold the wrapped module."""
CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)


def wrapped(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that a module wraps, from the outside in, with their attribute names."""
    for name, child in module.named_children():
        if name in WRAPPERS:
            yield name, child
            yield from wrapped(child)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    return [module, *(child for _, child in wrapped(module))][-1]


def kind_of(module: torch.nn.Module) -> type:
    """The class that the user wrote: ``fully_shard`` replaces it by a derived class."""
    return next(each for each in type(unwrapped(module)).__mro__ if not issubclass(each, FSDPModule))


def is_called(module: torch.nn.Module) -> bool:
    """Whether it has a forward. A ModuleList has none: its owner calls the members."""
    return type(unwrapped(module)).forward is not torch.nn.Module.forward


def stages_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that a training loop calls: the model, or the pipeline stages in a list."""
    return [model] if is_called(model) else [*model.children()]


def is_plain(module: torch.nn.Module) -> bool:
    """Whether it has only a weight and perhaps a bias: a matrix, a norm, a convolution."""
    inside = unwrapped(module)
    return _is_leaf(inside) and {name for name, _ in inside.named_parameters()} <= {"weight", "bias"}


def is_table(module: torch.nn.Module) -> bool:
    """Whether it is an embedding, including Megatron's partitioned one."""
    inside = unwrapped(module)
    if isinstance(inside, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return True
    counted = hasattr(inside, "num_embeddings") or hasattr(inside, "num_embeddings_per_partition")
    return counted and _is_leaf(inside) and rows_of(inside) > 0


def is_matrix(module: torch.nn.Module) -> bool:
    """Whether it is a single matrix and no embedding."""
    return _is_leaf(unwrapped(module)) and rows_of(module) > 0 and not is_table(module)


def rows_of(module: torch.nn.Module) -> int:
    """Rows of a module's matrix; only this rank's if a framework partitions it without DTensor."""
    weight = getattr(unwrapped(module), "weight", None)
    shape = shape_of(weight) if isinstance(weight, torch.Tensor) else ()
    return shape[0] if len(shape) == 2 else 0


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The full shape; DeepSpeed's ZeRO-3 empties parameters and keeps their shape in an attribute."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


@contextmanager
def without_hooks(module: torch.nn.Module, is_removed: Callable[[int, Any], bool]) -> Iterator[None]:
    """Remove forward hooks of a module and its submodules, given their id and function, for a while."""
    with ExitStack() as undo:
        for each in module.modules():
            for registry in (each._forward_pre_hooks, each._forward_hooks):
                undo.callback(_refill, registry, registry.copy())
                for key in [key for key, hook in registry.items() if is_removed(key, hook)]:
                    del registry[key]
        yield


def _refill(registry: dict[int, Any], contents: Mapping[int, Any]) -> None:
    registry.clear()
    registry.update(contents)


def _is_leaf(module: torch.nn.Module) -> bool:
    return not [*module.children()]
