"""Which part of a parameter is updated again (paper, section 6.1.1: "a copied slice").

To cut a slice by memory order is right only for updates that treat every element alone. ``separability``
finds out by trying: a scratch parameter is updated as a whole and in slices, on clones of the user's
optimizer. Factored, matrix and norm-based updates differ, and so would kernels whose vectors begin
elsewhere in a slice.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchscout.decision.signature import signatures
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
"""Elements of a slice. A multiple of 64: elsewhere a fused kernel's vectors would begin at other elements,
and healthy ranks would not reproduce their own update."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of a tensor's elements in the order of memory."""

    start: int
    end: int
    whole: bool = False
    """All of it, in its own shape, for an update that needs the shape."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of a tensor, which must be dense unless the whole of it is meant."""
        return tensor if self.whole else flat(tensor)[self.start : self.end]


def nth_slice(numel: int, count: int) -> Slice:
    """The slice whose turn it is when ``count`` have been taken before."""
    start = count * SLICE % (-(-numel // SLICE) * SLICE)
    return Slice(start, min(start + SLICE, numel))


def whole_of(tensor: torch.Tensor) -> Slice:
    return Slice(0, tensor.numel(), whole=True)


def local_of(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter, or of a tensor that is divided among ranks just as it is."""
    layout = DTensorLayout.of(tensor)
    if layout is None:
        return tensor.detach()
    own = DTensorLayout.of(parameter)
    if own is None or (layout.mesh, layout.placements) != (own.mesh, own.placements):
        raise ReplayError(f"a DTensor of placement {layout.placements} is not divided as its parameter is")
    return local_part(tensor)


def gradient_of(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of a gradient, divided as its parameter is; nothing is communicated.

    Where ranks have yet to add up what they have of it, this is what they have.
    """
    if not isinstance(gradient, DTensor) or is_unreduced(gradient, parameter):
        return local_part(gradient).detach()
    is_whole = all(each.is_replicate() for each in gradient.placements)
    if is_whole and isinstance(parameter, DTensor) and gradient.device_mesh == parameter.device_mesh:
        with torch.no_grad():  # each rank cuts its own part out
            return local_part(gradient.redistribute(placements=parameter.placements))
    return local_of(gradient, parameter)


def is_unreduced(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether ranks hold summands of the gradient of a parameter that each of them holds whole.

    Under sequence parallelism a norm has such a one; the optimizer's first use of it adds them up.
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
    """What the parameter's ranks get by adding up; all of them must come. Overwrites what this one has."""
    assert isinstance(gradient, DTensor), "only a DTensor is unreduced"
    assert isinstance(parameter, DTensor), "so is its parameter"
    with torch.no_grad():
        whole = gradient.redistribute(placements=parameter.placements)
        return local_part(gradient).copy_(local_part(whole))


_SEED = 0x5C007
# Odd and prime, so that the last vector is not full; above 128, where some optimizers begin to factor; and
# too small for the CPU to divide it among threads, whose borders a slice would not have.
_ROWS, _COLUMNS = 131, 229
_CUTS = (Slice(64 * 90, 64 * 270), Slice(64 * 390, _ROWS * _COLUMNS))


class Separability:
    """What was measured, once for each optimizer class, its implementation flags, and kind of parameter."""

    def __init__(self) -> None:
        self._obstacles: dict[Hashable, str | None] = {}

    def obstacle(self, optimizer: Optimizer, parameter: torch.Tensor) -> str | None:
        """Why no slice of this parameter can be updated alone; ``None`` where one can.

        ``ReplayError`` where a clone of the optimizer cannot step at all.
        """
        if parameter.numel() == 1:
            return "a single number has no slices"  # nor can its slots be told from a count of steps
        for name, slot in optimizer.state.get(parameter, {}).items():
            if isinstance(slot, torch.Tensor) and slot.shape != parameter.shape and slot.numel() > 1:
                return f"{type(optimizer).__name__} keeps {name} of another shape than its parameter"
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
            return f"{kind} keeps other state for a slice than for a whole parameter"
        expected = signatures(_cut(value, cut, first) for value in whole.values())
        results = zip(whole, expected, signatures(alone[name] for name in whole), strict=True)
        differing = [name for name, of_whole, of_slice in results if of_whole != of_slice]
        if differing:
            return f"{kind} updates the {differing[0]} of a slice otherwise than within the whole"
    return None


def _scratch(optimizer: Optimizer, parameter: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """A parameter of its own with gradient and state, and the gradient of a second step."""
    generator = torch.Generator().manual_seed(_SEED)
    dimensions = parameter.dim()
    shape = (1,) * (dimensions - 2) + (_ROWS, _COLUMNS) if dimensions > 1 else (_ROWS * _COLUMNS,)
    device = local_of(parameter, parameter).device

    def random(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

    def slot(value: Any) -> Any:
        shaped = isinstance(value, torch.Tensor) and value.shape == parameter.shape
        return random(value.dtype).abs() if shaped else value  # sums of squares must not be negative

    # An optimizer that makes its state when it is constructed has it already; others begin without.
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
