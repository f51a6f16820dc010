"""Clones an optimizer to update copies of one parameter as training does (paper, section 6.1.1).

A ``Blueprint`` is an optimizer before its update, reduced to one parameter, with numbered placeholders
instead of tensors. Tensors are sent to other ranks; everything else must already be equal there. Any rank
that has the tensors can build the clone.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from torchscout.errors import ReplayError
from torchscout.replay.capture.broadcast import captured, is_dense, refuse
from torchscout.replay.capture.context import preserved_rng
from torchscout.replay.guard import guarded
from torchscout.utils._torch import tree_map

__all__ = [
    "FAILURES",
    "Blueprint",
    "Parts",
    "blueprint_of",
    "build",
    "give_gradient",
    "group_of",
    "update",
]

Settings = dict[str, Any]

_MAX_SETTING = 1 << 16  # elements of a tensor that is a setting, and not part of the training state
_PLAIN = (
    Number,
    str,
    bytes,
    type,
    Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.memory_format,
    type(None),
)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Stands for a tensor."""

    number: int


class TensorExtractor:
    """Replaces tensors in settings by placeholders, and collects each tensor once, in order."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self._placeholders: dict[int, Placeholder] = {}

    def extract(self, value: Any, name: str) -> Any:
        """Return the value with placeholders for tensors, in new containers, since a step may write to them.

        Raise ``ReplayError`` if it cannot be copied.
        """
        if isinstance(value, torch.Tensor):
            return self._placeholder(value, name)
        if isinstance(value, _PLAIN) or _is_stateless(value):
            return value
        if type(value) in (list, tuple):
            return type(value)([self.extract(item, f"{name}.{i}") for i, item in enumerate(value)])
        if type(value) is set and all(isinstance(item, _PLAIN) for item in value):
            return set(value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self.extract(value[key], f"{name}.{key}")) for key in value)
        raise ReplayError(f"a {type(value).__name__} in the optimizer's {name} cannot be copied")

    def extract_all(self, values: Mapping[str, Any], part: str) -> Settings:
        return {key: self.extract(values[key], f"{part} {key}") for key in sorted(values)}

    def extract_possible(self, values: Mapping[str, Any], part: str) -> Settings:
        """Omit what cannot be copied, and tensors that are too large to be a setting."""
        extracted = {}
        for key in sorted(values):
            before = len(self.tensors)
            try:
                value = self.extract(values[key], f"{part} {key}")
                for tensor in self.tensors[before:]:
                    if isinstance(tensor, torch.nn.Parameter) or tensor.numel() > _MAX_SETTING:
                        raise ReplayError(f"a tensor of shape {tuple(tensor.shape)} is not a setting")
            except ReplayError:
                for tensor in self.tensors[before:]:
                    del self._placeholders[id(tensor)]
                del self.tensors[before:], self.names[before:]
            else:
                extracted[key] = value
        return extracted

    def _placeholder(self, tensor: torch.Tensor, name: str) -> Placeholder:
        if id(tensor) not in self._placeholders:
            refuse(tensor)
            self._placeholders[id(tensor)] = Placeholder(len(self.tensors))
            self.tensors.append(tensor)
            self.names.append(name)
        return self._placeholders[id(tensor)]


def _is_stateless(value: Any) -> bool:
    """Whether it is a function that is bound to no object."""
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    return isinstance(value, FunctionType) and not value.__closure__


def insert(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value with tensors in place of their placeholders, in new containers."""

    def inserted(leaf: Any) -> Any:
        if isinstance(leaf, Placeholder):
            return tensors[leaf.number]
        return set(leaf) if type(leaf) is set else leaf

    return tree_map(inserted, value)


def canonical(value: Any) -> str:
    """Return a text that is equal on ranks with equal values."""
    if isinstance(value, Placeholder):
        return f"tensor {value.number}"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{key!r}: {canonical(item)}" for key, item in value.items())) + "}"
    if type(value) in (list, tuple, set):
        items = sorted(map(canonical, value)) if type(value) is set else map(canonical, value)
        return f"{type(value).__name__}({', '.join(items)})"
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"  # a repr would contain its address
    if isinstance(value, torch.device):
        return value.type  # the index differs among ranks
    return repr(value)


FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    ReplayError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What an unknown optimizer may raise when it is read, or stepped outside of training."""

_SEED = 0x5C007
# A clone has its own state and groups, and its class's step: a scheduler's wrapper would step the original.
_REPLACED = ("state", "param_groups", "step")


@dataclass(frozen=True, slots=True)
class Parts:
    """What an optimizer has for one parameter, or for a slice of it."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    state: Settings


@dataclass(frozen=True, slots=True)
class Blueprint:
    """An optimizer of one parameter, without its tensors. The first two are parameter and gradient."""

    kind: type[Optimizer]
    hooks: tuple[str, ...]
    """Names of the attributes that contain hooks, which a clone has none of."""
    parts: Mapping[str, Settings]
    """``attribute``, ``group``, ``state``, and ``shared``: the state under string keys."""
    names: tuple[str, ...]
    """Names of the tensors, in order."""

    @property
    def slots(self) -> list[str]:
        """Names of the tensors in the parameter's state."""
        return [name for name, value in self.parts["state"].items() if isinstance(value, Placeholder)]

    def settings(self) -> dict[str, str]:
        """Return everything except tensors as text that is equal on ranks with equal values."""
        parts = self.parts.items()
        return {f"{part} {key}": canonical(value) for part, values in parts for key, value in values.items()}


def blueprint_of(
    optimizer: Optimizer, parameter: torch.Tensor, parts: Parts
) -> tuple[Blueprint, list[torch.Tensor]]:
    """Return the blueprint, and training's own tensors for it, which must be copied.

    Anything but tensors and plain values is omitted: a process group, a generator, an inner optimizer. A
    clone that needs such an object fails instead of changing training.
    """
    attributes = vars(optimizer)
    everything: dict[Any, Any] = optimizer.state
    hooks = tuple(name for name in attributes if name.startswith("_optimizer_") and name.endswith("_hooks"))
    own = {name: attributes[name] for name in attributes.keys() - {*hooks, *_REPLACED}}
    group = group_of(optimizer, parameter)
    settings = {key: group[key] for key in group.keys() - {"params", "param_names"}}
    extractor = TensorExtractor()
    extractor.extract(parts.parameter, "parameter")
    extractor.extract(parts.gradient, "gradient")
    extracted = {
        "attribute": extractor.extract_possible(own, "attribute"),
        "group": extractor.extract_possible(settings, "group"),
        "state": extractor.extract_all(parts.state, "state"),
        "shared": extractor.extract_possible(
            {key: everything[key] for key in everything if type(key) is str}, "shared"
        ),
    }
    blueprint = Blueprint(type(optimizer), hooks, extracted, tuple(extractor.names))
    # A copy is always dense, so a description must be of a dense tensor, too.
    return blueprint, [tensor if is_dense(tensor) else tensor.contiguous() for tensor in extractor.tensors]


def build(blueprint: Blueprint, tensors: Sequence[torch.Tensor]) -> tuple[Optimizer, torch.nn.Parameter]:
    """Return a clone that updates its own copies of the tensors, and its parameter with the gradient set."""
    copies = [captured(tensor) for tensor in tensors]
    parts = {part: insert(values, copies) for part, values in blueprint.parts.items()}
    # Not copy.copy: it calls __setstate__, which writes defaults to groups that it shares with training.
    clone: Optimizer = object.__new__(blueprint.kind)
    vars(clone).update(parts["attribute"])
    vars(clone).update({name: OrderedDict() for name in blueprint.hooks})
    # Autograd records a differentiable update, and forbids in-place writes to a leaf that requires gradients.
    leaf = torch.nn.Parameter(copies[0], requires_grad=not clone.defaults.get("differentiable", False))
    give_gradient(leaf, copies[1])
    state: defaultdict[Any, Any] = defaultdict(dict, parts["shared"])
    if parts["state"]:
        state[leaf] = parts["state"]
    clone.state = state
    clone.param_groups = [{**parts["group"], "params": [leaf]}]
    return clone, leaf


def give_gradient(leaf: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if gradient.dtype != leaf.dtype:
        leaf.grad_dtype = gradient.dtype
    leaf.grad = gradient


def update(clone: Optimizer, device: torch.device) -> None:
    """Run one step without hooks, with the same random numbers on every rank."""
    step: Callable[[Optimizer], Any] = type(clone).step
    while getattr(step, "hooked", False):  # PyTorch's wrapper, which calls global hooks
        step = step.__wrapped__  # type: ignore[attr-defined]
    with guarded(), torch.no_grad(), _own_randomness(device):
        step(clone)


def group_of(optimizer: Optimizer, parameter: torch.Tensor) -> Settings:
    for group in optimizer.param_groups:
        if any(member is parameter for member in group["params"]):
            return group
    if optimizer.param_groups and not any(group["params"] for group in optimizer.param_groups):
        # ZeRO gives its optimizer only what is being updated; in a sweep any settings that peers share will
        # do.
        return optimizer.param_groups[0]
    raise ReplayError("the optimizer no longer owns the parameter")


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Give all ranks the same random numbers, for optimizers with stochastic rounding."""
    with preserved_rng(device):
        torch.default_generator.manual_seed(_SEED)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(_SEED)
        yield
