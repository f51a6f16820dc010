"""Linear layers in float8 with delayed scaling: a scale comes from the largest numbers of earlier calls.

On CUDA the product is ``torch._scaled_mm``'s. The state of the scaling is where libraries keep it: in buffers
of the module, or in an object that the module holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.graphed_jobs import Graphed

HISTORY, LARGEST = 4, torch.finfo(torch.float8_e4m3fn).max


class Held:
    """The state of scaling, in an object that is no module."""

    def __init__(self, device: torch.device | str) -> None:
        self.history = torch.zeros(HISTORY, device=device)
        self.scale = torch.ones((), device=device)
        self.calls = 0


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        left, right = _quantized(given.flatten(0, -2), scale), _quantized(weight, torch.ones_like(scale))
        if given.is_cuda:
            one = torch.ones((), device=given.device)
            product = torch._scaled_mm(
                left, right.t(), scale_a=1 / scale, scale_b=one, out_dtype=torch.bfloat16
            )
            product = product.to(given.dtype)
        else:
            product = (left.float() / scale) @ right.float().t()
        return product.unflatten(0, given.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        given, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        return gradient @ weight, rows.t() @ given.flatten(0, -2), None


def _quantized(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (tensor * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


class Float8Linear(nn.Linear):
    """Quantizes by the scale of earlier calls, and then takes this one into account."""

    def __init__(self, inputs: int, outputs: int, *, is_held: bool) -> None:
        super().__init__(inputs, outputs)
        self.held: Held | None = None
        self.is_held = is_held
        self.register_buffer("history", torch.zeros(HISTORY))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.is_held and self.held is None:
            self.held = Held(given.device)
        state: Any = self.held if self.is_held else self
        product = _Product.apply(given, self.weight, state.scale.clone())
        with torch.no_grad():
            state.history.copy_(state.history.roll(1))
            state.history[0] = given.abs().amax()
            state.scale.copy_(LARGEST / 2 / state.history.amax().clamp(min=1e-6))
            if self.held is not None:
                self.held.calls += 1
        return product + self.bias


class Float8Net(Graphed):
    """The layers' products in float8; the state of one is in buffers, of the other in an object."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.stack:
            block.up = Float8Linear(block.up.in_features, block.up.out_features, is_held=False)
            block.down = Float8Linear(block.down.in_features, block.down.out_features, is_held=True)

    def extra_bits(self) -> list[torch.Tensor]:
        """What is neither a parameter nor a buffer."""
        held = [each.held for each in self.modules() if isinstance(each, Float8Linear) and each.held]
        return [each for of in held for each in (of.history, of.scale, torch.tensor(of.calls))]
