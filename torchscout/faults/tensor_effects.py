"""What a fault does to a tensor: bits, elements, ranges (paper, section 8's injected corruptions).

Tensors are changed in place and behind autograd's back, as a sick chip would change them. Only the
memory of this rank is touched, whatever a distributed tensor holds elsewhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

__all__ = ["FlipBit", "FlipBits", "Overwrite", "Scale", "SetValue", "StuckBit", "TensorEffect"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorEffect(ABC):
    """Something that happens to a tensor at a place."""

    def corrupt(self, tensor: torch.Tensor) -> str | None:
        """Change the tensor in place; say what became of what, or None if nothing has changed.

        A bit that is stuck where it is anyway corrupts nothing, and must not count as a fault.
        """
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.data  # unlike detach(), without a version counter that backward would check
        before = local.clone()
        told = self._change(local)
        return None if _is_same(before, local) else told

    @abstractmethod
    def _change(self, local: torch.Tensor) -> str: ...


@dataclass(frozen=True, slots=True)
class FlipBit(TensorEffect):
    bit: int
    """0 is the least significant."""
    index: int = 0
    """Which element, in row-major order."""

    def _change(self, local: torch.Tensor) -> str:
        return f"bit {self.bit} of {_rewrite(local, self.index, _flipped(local, [self.bit]))}"


@dataclass(frozen=True, slots=True)
class FlipBits(TensorEffect):
    """Several bits of one element; or of every n-th one, as a failing address line would hit."""

    bits: tuple[int, ...]
    index: int = 0
    """Of the first element that is hit."""
    every: int = 0
    """How far apart the elements are; 0 hits only one."""

    def _change(self, local: torch.Tensor) -> str:
        told = _rewrite(local, self.index, _flipped(local, self.bits), self.every)
        return f"bits {', '.join(map(str, self.bits))} of {told}"


@dataclass(frozen=True, slots=True)
class StuckBit(TensorEffect):
    """A bit that can only be 0, or only 1."""

    bit: int
    value: int
    index: int = 0
    every: int = 0

    def _change(self, local: torch.Tensor) -> str:
        mask = _mask(local, [self.bit])
        stuck = (lambda bits: bits | mask) if self.value else (lambda bits: bits & ~mask)
        return f"bit {self.bit} stuck at {self.value} in {_rewrite(local, self.index, stuck, self.every)}"


@dataclass(frozen=True, slots=True)
class SetValue(TensorEffect):
    value: float
    index: int = 0

    def _change(self, local: torch.Tensor) -> str:
        element = _element(local, self.index)
        before = element.item()
        element.fill_(self.value)
        return f"element {self.index}: {before} -> {element.item()}"


@dataclass(frozen=True, slots=True)
class Scale(TensorEffect):
    factor: float

    def _change(self, local: torch.Tensor) -> str:
        local.mul_(self.factor)
        return f"all {local.numel()} elements times {self.factor}"


@dataclass(frozen=True, slots=True)
class Overwrite(TensorEffect):
    """Elements that lie side by side become noise of the tensor's own size, or one value."""

    start: int
    length: int
    seed: int = 0
    value: float | None = None

    def _change(self, local: torch.Tensor) -> str:
        stop = self.start + self.length
        if not 0 <= self.start < stop <= local.numel():
            raise ValueError(f"elements {self.start} to {stop - 1} of a tensor of {local.numel()}")
        place = torch.arange(local.numel(), device=local.device).view(local.shape)
        written = torch.full_like(local, self.value) if self.value is not None else self._noise(local)
        local.copy_(torch.where((place >= self.start) & (place < stop), written, local))
        return f"elements {self.start} to {stop - 1} overwritten"

    def _noise(self, local: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        size = local.abs().max().item() or 1.0
        return (size * torch.randn(local.shape, generator=generator, device="cpu")).to(local)


def _rewrite(
    local: torch.Tensor, index: int, become: Callable[[torch.Tensor], torch.Tensor], every: int = 0
) -> str:
    """Change the bits of one element, or of every n-th from there on; in words."""
    element = _element(local, index)
    before, bits = element.item(), local.view(_INTEGERS[local.element_size()])
    if not every:
        one = _element(bits, index)
        one.copy_(become(one))
        return f"element {index}: {before} -> {element.item()}"
    place = torch.arange(local.numel(), device=local.device).view(local.shape) - index
    hit = (place >= 0) & (place % every == 0)
    bits.copy_(torch.where(hit, become(bits), bits))
    return f"every {every}th element from {index}, {int(hit.sum())} in all"


def _flipped(local: torch.Tensor, bits: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    mask = _mask(local, bits)
    return lambda held: held ^ mask


def _mask(local: torch.Tensor, bits: Sequence[int]) -> torch.Tensor:
    width = 8 * local.element_size()
    for bit in bits:
        if not 0 <= bit < width:
            raise ValueError(f"{local.dtype} has bits 0 to {width - 1}, got {bit}")
    if local.element_size() not in _INTEGERS:
        raise ValueError(f"cannot flip a bit of {local.dtype}; flip it in its real view")
    mask = sum(1 << bit for bit in set(bits))
    # The top bit is the sign of a signed integer, and only one byte wide integers are unsigned.
    signed = mask - (1 << width) if width > 8 and mask >> (width - 1) else mask
    return torch.tensor(signed, dtype=_INTEGERS[local.element_size()], device=local.device)


def _element(local: torch.Tensor, index: int) -> torch.Tensor:
    """A view of one element, whatever the strides."""
    if not 0 <= index < local.numel():
        raise ValueError(f"element {index} of a tensor of {local.numel()}")
    shape = local.shape
    for axis, size in enumerate(shape):
        local = local[index // math.prod(shape[axis + 1 :]) % size]
    return local


def _is_same(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Bit by bit: a NaN is the same as itself."""
    if after.is_complex():
        before, after = torch.view_as_real(before), torch.view_as_real(after)
    integers = _INTEGERS[after.element_size()]
    return torch.equal(before.view(integers), after.view(integers))
