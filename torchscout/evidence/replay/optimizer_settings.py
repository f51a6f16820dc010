"""What an optimizer keeps, with numbered places where its tensors were (paper, section 6.1.1: "update
configuration").

Tensors travel to other ranks and everything else must already agree there, so the two are taken apart here
and put together again. Which settings an optimizer has is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from torchscout.errors import ReplayError
from torchscout.evidence.replay.alignment import refuse

__all__ = ["Place", "Settings", "Taken", "put_back", "spelled"]

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
