"""Makes up calls of modules that training does not call (paper, section 6.1).

Hooks do not run while a CUDA graph is replayed, so there is no call to capture. The form of a module's first
call is noted instead: while steps are still eager or, if there is none of those, while the graph is captured.
A replay then runs the module, with its current weights, on random numbers of that form. Indices keep the
values that they had; zeros replace those that a graph has captured. Peers receive the source's values, so
these need not be training's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchscout.errors import ReplayError
from torchscout.replay.capture.broadcast import DTensorLayout, captured, described, local_part, room_for
from torchscout.replay.capture.context import RngState
from torchscout.replay.capture.hooks import CallCapture
from torchscout.replay.capture.invocation import Invocation, is_floating, tensors_in
from torchscout.utils._torch import tree_leaves
from torchscout.utils.cuda_graphs import is_capturing

__all__ = ["CallForm", "FirstCall", "TensorForm", "forms_of", "trained_outputs"]


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor without its values."""

    description: Mapping[str, Any]
    layout: DTensorLayout | None
    indices: torch.Tensor | None = None
    """The values of integers or booleans, if they could be copied."""

    @classmethod
    def of(cls, tensor: torch.Tensor, *, keep: bool = False) -> TensorForm:
        """With ``keep``, indices keep their values."""
        kept = captured(tensor) if keep and not is_floating(tensor) else None
        return cls(described(tensor), DTensorLayout.of(tensor), kept)

    def random(self, device: torch.device, seed: int, *, is_gradient: bool = False) -> torch.Tensor:
        """Return random numbers, the same in every check; a gradient's norm is about 1, so that none
        overflow."""
        if self.indices is not None:
            return self.indices.clone()
        room = room_for(self.description, device, self.layout)
        local = local_part(room)
        if is_floating(local):
            spread = 1 / math.sqrt(max(1, local.numel())) if is_gradient else 1.0
            numbers = local if local.dtype.itemsize > 1 else local.float()  # float8 has no random numbers
            generator = torch.Generator(local.device).manual_seed(seed)
            numbers.normal_(std=spread, generator=generator)
            local.copy_(numbers)
        else:
            local.zero_()
        return room


@dataclass(frozen=True, slots=True)
class CallForm:
    """One call of a module, without the values of its tensors."""

    call: Invocation
    """Without tensors, gradients and random states."""
    inputs: Mapping[int, TensorForm]
    outputs: Mapping[int, TensorForm]
    """The tensors that require gradients, by place."""

    def made_up(self, device: torch.device, *, is_source: bool) -> Invocation:
        """Return a call of this form, with values only on the source; raise ``ReplayError`` if it cannot be
        repeated."""
        if self.call.problem is not None:
            raise ReplayError(self.call.problem)
        call = replace(self.call, randomness=RngState.now(device), is_made_up=True)
        if not is_source:
            return call
        values = {place: form.random(device, place) for place, form in self.inputs.items()}
        outputs = self.outputs.items()
        return replace(
            call,
            leaves=[values.get(place, leaf) for place, leaf in enumerate(call.leaves)],
            gradients={place: form.random(device, place, is_gradient=True) for place, form in outputs},
        )


def forms_of(tree: Any, *, keep: bool = False) -> dict[int, TensorForm]:
    """Return the forms of a call's tensors, by place; with ``keep``, indices keep their values."""
    leaves = enumerate(tree_leaves(tree))
    return {place: TensorForm.of(leaf, keep=keep) for place, leaf in leaves if isinstance(leaf, torch.Tensor)}


def trained_outputs(output: Any) -> dict[int, TensorForm]:
    """Return the forms of the tensors that require gradients, by place."""
    places = enumerate(tensors_in(output))
    return {place: TensorForm.of(each) for place, each in places if each.requires_grad and is_floating(each)}


class FirstCall(CallCapture):
    """Notes the form of the next call, and captures no more."""

    _in_graphs = True

    def __init__(self, module: nn.Module, device: torch.device, expected: Collection[int]) -> None:
        self._form: CallForm | None = None
        self._inputs: dict[int, TensorForm] = {}
        super().__init__(module, device, keep=False, expected=expected)

    def made_up(self, *, is_source: bool) -> Invocation:
        return self.form.made_up(self._device, is_source=is_source)

    @property
    def form(self) -> CallForm:
        """Raises ``ReplayError`` if no call was seen."""
        if self._form is None:
            raise ReplayError(f"{self._problem}; a CUDA graph must be captured after torchscout is attached")
        return self._form

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        super()._before(module, args, kwargs)
        if self._begun is not None:
            with self._quietly():
                self._inputs = forms_of((args, kwargs), keep=not is_capturing())

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        super()._after(module, args, kwargs, output)
        if self._begun is not None:
            with self._quietly():
                self._form = CallForm(self._begun, self._inputs, trained_outputs(output))
        if self._form is not None:
            self.disarm()
