"""Selects the part of a parameter whose update is replayed (paper, section 6.1.1: "a copied slice").

A slice in memory order is valid only for elementwise updates. ``Separability`` tests that: it updates a
scratch parameter as a whole and in slices, on clones of the user's optimizer. The results differ for
factored, matrix and norm-based updates, and for kernels that vectorize a slice differently.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchscout.c3.signature import signatures
from torchscout.errors import ReplayError, describe_error
from torchscout.replay.capture.broadcast import DTensorLayout, flat, local_part
from torchscout.replay.recipes.optimizer_clone import (
    FAILURES,
    Parts,
    blueprint_of,
    build,
    give_gradient,
    group_of,
    update,
)

__all__ = [
    "SLICE",
    "Separability",
    "Slice",
    "gradient_of",
    "is_unreduced",
    "local_of",
    "nth_slice",
    "reduce",
    "whole_of",
]

SLICE = 1 << 16
"""Elements of a slice. A multiple of 64: otherwise a fused kernel's vectors would start at other elements,
and healthy ranks would not reproduce their own update."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of a tensor's elements in memory order."""

    start: int
    end: int
    whole: bool = False
    """Whether it is the whole tensor in its own shape, for an update that depends on the shape."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a tensor, which must be dense unless ``whole``."""
        return tensor if self.whole else flat(tensor)[self.start : self.end]


def nth_slice(numel: int, count: int) -> Slice:
    """Return the slice after ``count`` others, in rotation."""
    start = count * SLICE % (-(-numel // SLICE) * SLICE)
    return Slice(start, min(start + SLICE, numel))


def whole_of(tensor: torch.Tensor) -> Slice:
    return Slice(0, tensor.numel(), whole=True)


def local_of(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, or of a tensor with the same placement."""
    layout = DTensorLayout.of(tensor)
    if layout is None:
        return tensor.detach()
    own = DTensorLayout.of(parameter)
    if own is None or (layout.mesh, layout.placements) != (own.mesh, own.placements):
        raise ReplayError(f"a DTensor of placement {layout.placements} is not placed as its parameter is")
    return local_part(tensor)


def gradient_of(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient, placed as its parameter, without communication.

    Of a gradient that ranks have not added up yet, return this rank's summand.
    """
    if not isinstance(gradient, DTensor) or is_unreduced(gradient, parameter):
        return local_part(gradient).detach()
    is_whole = all(each.is_replicate() for each in gradient.placements)
    if is_whole and isinstance(parameter, DTensor) and gradient.device_mesh == parameter.device_mesh:
        with torch.no_grad():  # local: each rank takes its own part
            return local_part(gradient.redistribute(placements=parameter.placements))
    return local_of(gradient, parameter)


def is_unreduced(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether ranks have summands of the gradient of a replicated parameter.

    Norms have such gradients under sequence parallelism; the optimizer's first operation adds them up.
    """
    of_gradient, of_parameter = DTensorLayout.of(gradient), DTensorLayout.of(parameter)
    if of_gradient is None or of_parameter is None or of_gradient.mesh != of_parameter.mesh:
        return False
    pairs = [*zip(of_gradient.placements, of_parameter.placements, strict=True)]
    summands = [here.is_partial() and there.is_replicate() for here, there in pairs]
    return any(summands) and all(
        yes or here == there for yes, (here, there) in zip(summands, pairs, strict=True)
    )


def reduce(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Add up the gradient, in place, among the parameter's ranks, all of which must call this."""
    assert isinstance(gradient, DTensor), "only a DTensor is unreduced"
    assert isinstance(parameter, DTensor), "so is its parameter"
    with torch.no_grad():
        whole = gradient.redistribute(placements=parameter.placements)
        return local_part(gradient).copy_(local_part(whole))


_SEED = 0x5C007
# Prime, so that the last vector is not full; above 128, where some optimizers start to factor; and too small
# to be divided among CPU threads, at whose boundaries a slice would differ.
_ROWS, _COLUMNS = 131, 229
_CUTS = (Slice(64 * 90, 64 * 270), Slice(64 * 390, _ROWS * _COLUMNS))


class Separability:
    """Results, measured once for each optimizer class, its implementation flags, and kind of parameter."""

    def __init__(self) -> None:
        self._obstacles: dict[Hashable, str | None] = {}

    def obstacle(self, optimizer: Optimizer, parameter: torch.Tensor) -> str | None:
        """Return why a slice of this parameter cannot be updated alone; None if it can.

        Raise ``ReplayError`` if a clone of the optimizer cannot step.
        """
        if parameter.numel() == 1:
            return "a single number has no slices"  # and its slots look like a step count
        for name, slot in optimizer.state.get(parameter, {}).items():
            if isinstance(slot, torch.Tensor) and slot.shape != parameter.shape and slot.numel() > 1:
                return f"{type(optimizer).__name__} keeps {name} in a different shape than its parameter"
        key = _kind_of(optimizer, parameter)
        if key not in self._obstacles:
            try:
                self._obstacles[key] = _measured(optimizer, parameter)
            except FAILURES as failure:
                raise ReplayError(
                    f"a clone of {type(optimizer).__name__} cannot step: {describe_error(failure)}"
                ) from failure
        return self._obstacles[key]


def _kind_of(optimizer: Optimizer, parameter: torch.Tensor) -> Hashable:
    group = group_of(optimizer, parameter)
    flags = sorted(
        (name, repr(value)) for name, value in group.items() if isinstance(value, bool | str | type(None))
    )
    return type(optimizer), tuple(flags), parameter.dtype, parameter.device.type, parameter.dim()


def _measured(optimizer: Optimizer, parameter: torch.Tensor) -> str | None:
    kind = type(optimizer).__name__
    first, second = _scratch(optimizer, parameter)
    whole = _updated_twice(optimizer, parameter, first, second)
    for cut in _CUTS:
        state = {name: _cut(value, cut, first) for name, value in first.state.items()}
        parts = Parts(cut.of(first.parameter), cut.of(first.gradient), state)
        try:
            alone = _updated_twice(optimizer, parameter, parts, cut.of(second))
        except FAILURES as failure:
            return f"{kind} cannot step a slice: {describe_error(failure)}"
        if alone.keys() != whole.keys():
            return f"{kind} keeps different state for a slice than for a whole parameter"
        expected = signatures(_cut(value, cut, first) for value in whole.values())
        results = zip(whole, expected, signatures(alone[name] for name in whole), strict=True)
        differing = [name for name, of_whole, of_slice in results if of_whole != of_slice]
        if differing:
            return f"{kind} updates the {differing[0]} of a slice differently than within the whole"
    return None


def _scratch(optimizer: Optimizer, parameter: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Return a scratch parameter with gradient and state, and the gradient of a second step."""
    generator = torch.Generator().manual_seed(_SEED)
    dimensions = parameter.dim()
    shape = (1,) * (dimensions - 2) + (_ROWS, _COLUMNS) if dimensions > 1 else (_ROWS * _COLUMNS,)
    device = local_of(parameter, parameter).device

    def random(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

    def slot(value: Any) -> Any:
        shaped = isinstance(value, torch.Tensor) and value.shape == parameter.shape
        return random(value.dtype).abs() if shaped else value  # sums of squares must not be negative

    # Optimizers that create state on construction already have it; others start without.
    state = {name: slot(value) for name, value in optimizer.state.get(parameter, {}).items()}
    return Parts(random(parameter.dtype), random(parameter.dtype), state), random(parameter.dtype)


def _cut(value: Any, cut: Slice, parts: Parts) -> Any:
    shaped = isinstance(value, torch.Tensor) and value.shape == parts.parameter.shape
    return cut.of(value) if shaped else value


def _updated_twice(
    optimizer: Optimizer, parameter: torch.Tensor, parts: Parts, second: torch.Tensor
) -> dict[str, torch.Tensor]:
    blueprint, tensors = blueprint_of(optimizer, parameter, parts)
    clone, leaf = build(blueprint, tensors)
    update(clone, leaf.device)
    give_gradient(leaf, second.clone())
    update(clone, leaf.device)
    slots = {name: value for name, value in clone.state[leaf].items() if isinstance(value, torch.Tensor)}
    return {"parameter": leaf.detach(), **slots}
