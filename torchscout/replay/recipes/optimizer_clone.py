"""One parameter's update as training does it, on copies (paper, section 6.1.1).

A ``Blueprint`` is an optimizer as it is before its update, reduced to one parameter, with numbered places
instead of tensors. Tensors are sent to other ranks, and everything else must already be equal there. Any
rank that has the tensors can build the optimizer again.
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
from torchscout.replay.capture.context import unmoved
from torchscout.replay.guard import guarded

__all__ = [
    "FAILURES",
    "Blueprint",
    "Parts",
    "Place",
    "Settings",
    "Taken",
    "blueprint_of",
    "build",
    "give_gradient",
    "group_of",
    "put_back",
    "spelled",
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
class Place:
    """Where a tensor belongs."""

    number: int


class Taken:
    """The tensors taken out of settings, each once, in the order in which they were met."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self._places: dict[int, Place] = {}

    def take(self, value: Any, name: str) -> Any:
        """The value with places for tensors; containers are new ones, for a step may write to them."""
        if isinstance(value, torch.Tensor):
            return self._place(value, name)
        if isinstance(value, _PLAIN) or _holds_nothing(value):
            return value
        if type(value) in (list, tuple):
            return type(value)([self.take(item, f"{name}.{i}") for i, item in enumerate(value)])
        if type(value) is set and all(isinstance(item, _PLAIN) for item in value):
            return set(value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self.take(value[key], f"{name}.{key}")) for key in value)
        raise ReplayError(f"a {type(value).__name__} in the optimizer's {name} cannot be copied")

    def take_all(self, values: Mapping[str, Any], part: str) -> Settings:
        return {key: self.take(values[key], f"{part} {key}") for key in sorted(values)}

    def take_possible(self, values: Mapping[str, Any], part: str) -> Settings:
        """Without what cannot be copied, and without tensors that are too much to be a setting."""
        taken = {}
        for key in sorted(values):
            before = len(self.tensors)
            try:
                value = self.take(values[key], f"{part} {key}")
                for tensor in self.tensors[before:]:
                    _require_setting(tensor)
            except ReplayError:
                self._forget_from(before)
            else:
                taken[key] = value
        return taken

    def _place(self, tensor: torch.Tensor, name: str) -> Place:
        if id(tensor) not in self._places:
            refuse(tensor)
            self._places[id(tensor)] = Place(len(self.tensors))
            self.tensors.append(tensor)
            self.names.append(name)
        return self._places[id(tensor)]

    def _forget_from(self, number: int) -> None:
        for tensor in self.tensors[number:]:
            del self._places[id(tensor)]
        del self.tensors[number:], self.names[number:]


def _holds_nothing(value: Any) -> bool:
    """A function with no object behind it that it could change."""
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    return isinstance(value, FunctionType) and not value.__closure__


def _require_setting(tensor: torch.Tensor) -> None:
    if isinstance(tensor, torch.nn.Parameter) or tensor.numel() > _MAX_SETTING:
        raise ReplayError(f"a tensor of shape {tuple(tensor.shape)} is no setting")


def put_back(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value with the tensors in their places; containers are new ones again."""
    if isinstance(value, Place):
        return tensors[value.number]
    if type(value) in (list, tuple):
        return type(value)([put_back(item, tensors) for item in value])
    if type(value) in (dict, OrderedDict):
        return type(value)((key, put_back(item, tensors)) for key, item in value.items())
    return set(value) if type(value) is set else value


def spelled(value: Any) -> str:
    """A text that is the same on every rank that has the same."""
    if isinstance(value, Place):
        return f"tensor {value.number}"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{key!r}: {spelled(item)}" for key, item in value.items())) + "}"
    if type(value) in (list, tuple, set):
        items = sorted(map(spelled, value)) if type(value) is set else map(spelled, value)
        return f"{type(value).__name__}({', '.join(items)})"
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"  # a repr would tell where it lies in memory
    if isinstance(value, torch.device):
        return value.type  # each rank has its own
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
"""What an optimizer of any origin may raise when it is read or stepped outside of its training."""

_SEED = 0x5C007
# A clone has its own state and groups, and its class's step: what a scheduler puts there steps the original.
_REPLACED = ("state", "param_groups", "step")


@dataclass(frozen=True, slots=True)
class Parts:
    """What an optimizer holds for one parameter, or for a slice of it."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    state: Settings


@dataclass(frozen=True, slots=True)
class Blueprint:
    """An optimizer of one parameter without its tensors; the first two are parameter and gradient."""

    kind: type[Optimizer]
    attributes: Settings
    hooks: tuple[str, ...]
    """The attributes that hold hooks; a clone has none."""
    group: Settings
    state: Settings
    shared: Settings
    """What ``Optimizer.state`` keeps under names instead of parameters."""
    names: tuple[str, ...]
    """The tensors' names, by place."""

    @property
    def slots(self) -> list[str]:
        """The tensors among the parameter's state."""
        return [name for name, value in self.state.items() if isinstance(value, Place)]

    def settings(self) -> dict[str, str]:
        """All that is no tensor, spelled alike on every rank that has the same."""
        parts = {
            "attribute": self.attributes,
            "group": self.group,
            "state": self.state,
            "shared": self.shared,
        }
        return {f"{part} {key}": spelled(parts[part][key]) for part in parts for key in parts[part]}


def blueprint_of(
    optimizer: Optimizer, parameter: torch.Tensor, parts: Parts
) -> tuple[Blueprint, list[torch.Tensor]]:
    """The blueprint, and the tensors that belong into it: training's own, to be copied.

    What an optimizer keeps besides tensors and plain values is left out: its process group, its generator,
    an optimizer inside it. A clone that needs such a thing fails instead of changing training.
    """
    attributes = vars(optimizer)
    hooks = tuple(name for name in attributes if name.startswith("_optimizer_") and name.endswith("_hooks"))
    own = {name: attributes[name] for name in attributes.keys() - {*hooks, *_REPLACED}}
    everything: dict[Any, Any] = optimizer.state
    taken = Taken()
    taken.take(parts.parameter, "parameter")
    taken.take(parts.gradient, "gradient")
    blueprint = Blueprint(
        kind=type(optimizer),
        attributes=taken.take_possible(own, "attribute"),
        hooks=hooks,
        group=taken.take_possible(_settings_of(optimizer, parameter), "group"),
        state=taken.take_all(parts.state, "state"),
        shared=taken.take_possible(
            {key: everything[key] for key in everything if type(key) is str}, "shared"
        ),
        names=tuple(taken.names),
    )
    # A copy is always dense, and what a peer describes must be what the source's copy is.
    return blueprint, [tensor if is_dense(tensor) else tensor.contiguous() for tensor in taken.tensors]


def build(blueprint: Blueprint, tensors: Sequence[torch.Tensor]) -> tuple[Optimizer, torch.nn.Parameter]:
    """An optimizer of its own copies of the tensors, with the gradient in place."""
    copies = [captured(tensor) for tensor in tensors]
    # Not copy.copy: it calls __setstate__, which writes defaults into the groups that it would share.
    clone: Optimizer = object.__new__(blueprint.kind)
    vars(clone).update(put_back(blueprint.attributes, copies))
    vars(clone).update({name: OrderedDict() for name in blueprint.hooks})
    # A differentiable update records itself, which a leaf that requires gradients does not permit.
    leaf = torch.nn.Parameter(copies[0], requires_grad=not clone.defaults.get("differentiable", False))
    give_gradient(leaf, copies[1])
    state: defaultdict[Any, Any] = defaultdict(dict, put_back(blueprint.shared, copies))
    if blueprint.state:
        state[leaf] = put_back(blueprint.state, copies)
    clone.state = state
    clone.param_groups = [{**put_back(blueprint.group, copies), "params": [leaf]}]
    return clone, leaf


def give_gradient(leaf: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if gradient.dtype != leaf.dtype:
        leaf.grad_dtype = gradient.dtype
    leaf.grad = gradient


def update(clone: Optimizer, device: torch.device) -> None:
    """One step, without the hooks around it, and with the same random numbers on every rank."""
    step: Callable[[Optimizer], Any] = type(clone).step
    while getattr(step, "hooked", False):  # torch's wrapper, which calls the hooks of all optimizers
        step = step.__wrapped__  # type: ignore[attr-defined]
    with guarded(), torch.no_grad(), _own_randomness(device):
        step(clone)


def group_of(optimizer: Optimizer, parameter: torch.Tensor) -> Settings:
    for group in optimizer.param_groups:
        if any(member is parameter for member in group["params"]):
            return group
    if optimizer.param_groups and not any(group["params"] for group in optimizer.param_groups):
        # ZeRO shows its optimizer only what is being updated; in a sweep any settings do that peers share.
        return optimizer.param_groups[0]
    raise ReplayError("the optimizer no longer owns the parameter")


def _settings_of(optimizer: Optimizer, parameter: torch.Tensor) -> Settings:
    """The parameter's group without the lists that go parallel to its parameters."""
    return {
        key: value
        for key, value in group_of(optimizer, parameter).items()
        if key not in ("params", "param_names")
    }


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """For optimizers that round at random: all ranks draw alike."""
    with unmoved(device):
        torch.default_generator.manual_seed(_SEED)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(_SEED)
        yield
