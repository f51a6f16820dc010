"""Linear layers in float8 with delayed scaling: a scale comes from the largest numbers of earlier calls.

On CUDA devices that can the product is ``torch._scaled_mm``'s. The state of the scaling is where libraries
keep it: in buffers of the module, or in an object that the module holds.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  as everywhere

from evaluation.jobs.models import GPT

HISTORY, LARGEST = 4, torch.finfo(torch.float8_e4m3fn).max
MULTIPLE = 16
"""Of which sizes must be for ``torch._scaled_mm``."""
Model = TypeVar("Model", bound=GPT)


class Held:
    """The state of scaling, in an object that is no module."""

    def __init__(self) -> None:
        self.history, self.scale, self.calls = torch.zeros(HISTORY), torch.ones(()), 0


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        left, right = _quantized(given.flatten(0, -2), scale), _quantized(weight, torch.ones_like(scale))
        if given.is_cuda and torch.cuda.get_device_capability() >= (8, 9):
            one = torch.ones((), device=given.device)
            product = torch._scaled_mm(
                left, right.t(), scale_a=1 / scale, scale_b=one, out_dtype=torch.bfloat16
            )
            product = product.to(given.dtype)
        else:
            product = (left.float() / scale) @ right.float().t()
        return product[: given.flatten(0, -2).shape[0], : weight.shape[0]].unflatten(0, given.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        given, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return gradient @ weight, rows.t() @ given.flatten(0, -2), None


def _quantized(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = ((-each) % MULTIPLE for each in tensor.shape)
    padded = F.pad(tensor, (0, columns, 0, rows))
    return (padded * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


class Float8Linear(nn.Linear):
    """Quantizes by the scale of earlier calls, and then takes this one into account."""

    def __init__(self, inputs: int, outputs: int, *, is_held: bool) -> None:
        super().__init__(inputs, outputs)
        self.held = Held() if is_held else None
        if not is_held:
            self.register_buffer("history", torch.zeros(HISTORY))
            self.register_buffer("scale", torch.ones(()))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        state: Any = self.held or self
        product = _Product.apply(given, self.weight, state.scale.clone())
        with torch.no_grad():
            state.history.copy_(state.history.roll(1))
            state.history[0] = given.abs().amax()
            state.scale.copy_(LARGEST / 2 / state.history.amax().clamp(min=1e-6))
            if self.held is not None:
                self.held.calls += 1
        return product + self.bias


class Scaling:
    """The states of scaling that are in objects, which their library saves."""

    def __init__(self, states: list[Held]) -> None:
        self._states = states

    def state_dict(self) -> dict[str, Any]:
        return {str(place): vars(each) for place, each in enumerate(self._states)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for place, each in enumerate(self._states):
            each.history.copy_(state[str(place)]["history"])
            each.scale.copy_(state[str(place)]["scale"])
            each.calls = state[str(place)]["calls"]


def in_float8(model: Model) -> Model:
    """The layers' products in float8; the state of one is in buffers, of the other in an object."""
    for block in model.blocks:
        block.up = Float8Linear(block.up.in_features, block.up.out_features, is_held=False)
        block.down = Float8Linear(block.down.in_features, block.down.out_features, is_held=True)
    return model


def scaling_of(model: nn.Module) -> Scaling:
    return Scaling([each.held for each in model.modules() if isinstance(each, Float8Linear) and each.held])
