"""Finds the model and the optimizers that a script trains, among the objects of its process.

Nothing is hooked or replaced for this: the garbage collector knows all modules and optimizers.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torchscout.adapters.modules import kind_of
from torchscout.utils.text import listed

__all__ = ["describe", "model_of", "optimizer_count", "parameters_of"]

_Kind = TypeVar("_Kind")
_ENGINES = {
    "deepspeed.runtime": "DeepSpeed: call enable_resiliency(engine)",
    "megatron.core.distributed": "Megatron-Core: call enable_resiliency(model_chunks, optimizer)",
}
"""Packages whose modules train a model in their own way: its updates are over later than the optimizers that
they contain have stepped. What a script can do instead."""


def parameters_of(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """The identities of an optimizer's parameters. A wrapper around an optimizer has the same."""
    return frozenset(id(each) for group in optimizer.param_groups for each in group["params"])


def optimizer_count() -> int:
    """How many optimizers this process has; wrappers are not counted."""
    return len(
        {parameters_of(each) for each in _objects(torch.optim.Optimizer) if hasattr(each, "param_groups")}
    )


def model_of(optimizers: Sequence[torch.optim.Optimizer]) -> torch.nn.Module:
    """Return the outermost module with the parameters that these optimizers update.

    Raises ``ValueError`` if there is none, or more than one, or a framework trains it in its own way.
    """
    if (advice := _engine()) is not None:
        raise ValueError(f"the model is trained by {advice} in the script instead")
    trained = frozenset[int]().union(*map(parameters_of, optimizers))
    roots = [*_roots(trained)]
    whole = [each for each in roots if trained <= {id(parameter) for parameter in each.parameters()}]
    parallel = [each for each in whole if isinstance(each, DistributedDataParallel | FSDPModule)]
    found = parallel or whole
    if len(found) == 1:
        return found[0]
    names = listed([type(each).__name__ for each in optimizers])
    if not roots:
        raise ValueError(f"no torch.nn.Module has the parameters that {names} updates")
    which = listed(sorted(describe(each) for each in found or roots))
    raise ValueError(f"it is not clear which is the model that {names} trains: {which}")


def describe(model: torch.nn.Module) -> str:
    """The class of a model, and of the module that it wraps."""
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    name, outer = kind_of(inside).__name__, type(model).__name__
    return name if inside is model else f"{outer}({name})"


def _engine() -> str | None:
    """The framework that trains a model of this process in its own way, and what to do; None without one."""
    packages = {type(each).__module__ for each in _objects(torch.nn.Module)}
    engines = (
        advice
        for package, advice in _ENGINES.items()
        if any(f"{each}.".startswith(f"{package}.") for each in packages)
    )
    return next(engines, None)


def _roots(trained: frozenset[int]) -> Iterator[torch.nn.Module]:
    """Yield the modules that hold trained parameters, directly or not, and that no other module holds."""
    parents: dict[int, list[torch.nn.Module]] = defaultdict(list)
    found: list[torch.nn.Module] = []
    for module in _objects(torch.nn.Module):
        for child in _values(module, "_modules"):
            parents[id(child)].append(module)
        if any(id(each) in trained for each in _values(module, "_parameters")):
            found.append(module)
    seen: set[int] = set()
    while found:
        module = found.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found += parents[id(module)]
            if not parents[id(module)]:
                yield module


def _values(module: torch.nn.Module, name: str) -> Iterable[object]:
    """The children or parameters of a module, which may not have been initialized yet."""
    table = vars(module).get(name)
    return table.values() if isinstance(table, dict) else ()


def _objects(kind: type[_Kind]) -> list[_Kind]:
    # By type: ``isinstance`` would evaluate proxies, and weak ones raise.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
