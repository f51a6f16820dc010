"""What a fault does once it fires: to a tensor, or to its own process.

Tensors are changed in place and behind autograd's back, as a sick chip would change them.
"""

from __future__ import annotations

import math
import os
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

__all__ = ["FlipBit", "ProcessEffect", "Scale", "SetValue", "Signal", "Sleep", "TensorEffect"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ProcessEffect(ABC):
    """Something that happens to the process at a place."""

    @abstractmethod
    def happen(self) -> None: ...


class TensorEffect(ABC):
    """Something that happens to a tensor at a place."""

    @abstractmethod
    def corrupt(self, tensor: torch.Tensor) -> str:
        """Change the tensor in place; say what became of what."""


@dataclass(frozen=True, slots=True)
class FlipBit(TensorEffect):
    bit: int
    """0 is the least significant."""
    index: int = 0
    """Which element, in row-major order."""

    def corrupt(self, tensor: torch.Tensor) -> str:
        element = _element(tensor, self.index)
        width = 8 * element.element_size()
        if not 0 <= self.bit < width:
            raise ValueError(f"{tensor.dtype} has bits 0 to {width - 1}, got {self.bit}")
        if element.element_size() not in _INTEGERS:
            raise ValueError(f"cannot flip a bit of {tensor.dtype}; flip it in its real view")
        before = element.item()
        # The top bit is the sign of a signed integer, and only one byte wide integers are unsigned.
        mask = 1 << self.bit if self.bit < width - 1 or width == 8 else -(1 << self.bit)
        element.view(_INTEGERS[element.element_size()]).bitwise_xor_(mask)
        return f"bit {self.bit} of element {self.index}: {before} -> {element.item()}"


@dataclass(frozen=True, slots=True)
class SetValue(TensorEffect):
    value: float
    index: int = 0

    def corrupt(self, tensor: torch.Tensor) -> str:
        element = _element(tensor, self.index)
        before = element.item()
        element.fill_(self.value)
        return f"element {self.index}: {before} -> {element.item()}"


@dataclass(frozen=True, slots=True)
class Scale(TensorEffect):
    factor: float

    def corrupt(self, tensor: torch.Tensor) -> str:
        local = _local(tensor)
        local.mul_(self.factor)
        return f"all {local.numel()} elements times {self.factor}"


@dataclass(frozen=True, slots=True)
class Sleep(ProcessEffect):
    seconds: float

    def happen(self) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Signal(ProcessEffect):
    number: signal.Signals

    def happen(self) -> None:
        os.kill(os.getpid(), self.number)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank, out of autograd's sight."""
    data = tensor.data  # unlike detach(), without a version counter that backward would check
    return data.to_local() if isinstance(data, DTensor) else data


def _element(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A view of one element, whatever the strides."""
    local = _local(tensor)
    if not 0 <= index < local.numel():
        raise ValueError(f"element {index} of a tensor of {local.numel()}")
    for size, inner in _sizes(local):
        local = local[index // inner % size]
    return local


def _sizes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Each dimension's size, and how many elements lie under one step of it."""
    shape = tensor.shape
    return [(size, math.prod(shape[axis + 1 :])) for axis, size in enumerate(shape)]
