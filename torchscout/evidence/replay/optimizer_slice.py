"""Which part of a parameter is updated again, and what can be cut from an optimizer's tensors
(paper, section 6.1.1: "a copied slice").

Cutting by memory order is right only for updates that treat every element alone; whether one does is
measured by ``separability``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from torchscout.errors import ReplayError
from torchscout.evidence.replay.alignment import flat
from torchscout.evidence.replay.layout import Layout, local_part

__all__ = ["SLICE", "Slice", "gradient_of", "is_unreduced", "local_of", "nth_slice", "reduce", "whole_of"]

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
    layout = Layout.of(tensor)
    if layout is None:
        return tensor.detach()
    own = Layout.of(parameter)
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
    of_gradient, of_parameter = Layout.of(gradient), Layout.of(parameter)
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
