"""A captured call of experts, made over for other numbers of rows (paper, section 6.2, "Online replay").

Rows are taken in turn from those that were captured, so that an expert sees real activations at any shape.
An expert that nobody asked in that step gets random ones, for what is unpopular must not be left unchecked.
Which argument is what is read off the call: rows of activations, and perhaps how many of them are whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchscout.errors import ReplayError
from torchscout.evidence.replay.invocation import Invocation, is_floating
from torchscout.experts.coverage import Rows

__all__ = ["Rerouting"]


@dataclass(frozen=True, slots=True)
class Rerouting:
    """What a router might have sent."""

    rows: Rows

    def require(self, call: Invocation) -> None:
        """A ``ReplayError`` says why it cannot be made of a call, whose values must have been kept."""
        form = _form(call)
        if len(self.rows) != form.experts:
            raise ReplayError(f"its call is for {form.experts} experts, the shape for {len(self.rows)}")

    def applied(self, call: Invocation) -> Invocation:
        """The call with this many rows for each expert."""
        self.require(call)
        form, wanted = _form(call), sum(self.rows)

        def made_over(leaf: Any) -> Any:
            is_routed = is_floating(leaf) and leaf.dim() and leaf.shape[0] == form.captured
            return _repeated(leaf, form.total, wanted) if is_routed else leaf

        leaves = [made_over(leaf) for leaf in call.leaves]
        for place, count in zip(form.counts, form.spelled(self.rows), strict=True):
            leaves[place] = count
        gradients = {place: made_over(each) for place, each in call.gradients.items()}
        return replace(call, leaves=leaves, gradients=gradients)


@dataclass(frozen=True, slots=True)
class _Form:
    """What a call's arguments are."""

    captured: int
    """Rows of the activations; frameworks may pad them."""
    total: int
    """Those that belong to an expert."""
    experts: int
    counts: range
    """The places of the arguments that say how many rows are whose; none for a single expert."""
    like: torch.Tensor | None
    """Those counts, where they are a tensor."""

    def spelled(self, rows: Rows) -> Sequence[Any]:
        """Counts as this call gives them."""
        if not self.counts:
            return ()
        return rows if self.like is None else [self.like.new_tensor(rows)]


def _form(call: Invocation) -> _Form:
    activations = next((leaf for leaf in call.leaves if is_floating(leaf) and leaf.dim() >= 2), None)
    if activations is None:
        raise ReplayError("no argument of it has rows of activations")
    captured = int(activations.shape[0])
    for place, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 1 and _is_whole(leaf):
            total = int(leaf.sum())
            if total <= captured:
                return _Form(captured, total, leaf.numel(), range(place, place + 1), leaf)
    numbers = [place for place, leaf in enumerate(call.leaves) if type(leaf) is int]
    counts = range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
    if numbers == [*counts] and numbers and sum(call.leaves[place] for place in numbers) == captured:
        return _Form(captured, captured, len(numbers), counts, None)
    return _Form(captured, captured, 1, range(0), None)


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64)


def _repeated(tensor: torch.Tensor, available: int, wanted: int) -> torch.Tensor:
    """The first ``available`` rows over and over, until there are ``wanted``; random ones if none is."""
    if not available:
        generator = torch.Generator().manual_seed(wanted)  # the same on all peers
        drawn = torch.randn(wanted, *tensor.shape[1:], generator=generator, device="cpu")
        return drawn.to(device=tensor.device, dtype=tensor.dtype)
    return tensor[torch.arange(wanted, device=tensor.device) % available]
