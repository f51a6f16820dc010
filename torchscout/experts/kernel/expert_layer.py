"""Trainable expert layers on the grouped GEMM (paper, section 6.2).

Rows must already be sorted by expert: routing and the exchange among ranks are not included.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from torchscout.utils._torch import assert_async

if TYPE_CHECKING:
    from torchscout.experts.kernel.grouped_gemm import GroupedGemm

__all__ = ["Experts", "Gemms", "grouped_linear", "standard_gemm"]

Gemms = Callable[[int, int, torch.device], "GroupedGemm"]
"""Returns the kernel of one projection, given its hidden and intermediate features and its device."""


def standard_gemm(hidden: int, intermediate: int, device: torch.device) -> GroupedGemm:
    """Return a kernel with one program for each multiprocessor and the default tiling."""
    from torchscout.experts.kernel.grouped_gemm import GroupedGemm, programs_of

    return GroupedGemm(hidden, intermediate, programs=programs_of(device))


def grouped_linear(
    x: Tensor, weights: Tensor, rows: Sequence[int] | Tensor, gemm: Gemms = standard_gemm
) -> Tensor:
    """Return ``x @ weights[expert]`` for the rows of each expert; ``x`` is sorted by expert.

    ``weights`` are [experts, hidden, intermediate]; ``rows`` has the number of rows of each expert. A tensor
    on the device needs no synchronization: the device checks that it adds up to the rows of ``x``.
    """
    made = _made_for(x, weights, gemm)
    placed = _rows_on(rows, x, weights.shape[0])
    out: Tensor = _GroupedLinear.apply(x, weights, placed, made)  # type: ignore[no-untyped-call]
    return out


class Experts(nn.Module):
    """The experts of one layer: two projections each, with an activation between them."""

    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        *,
        activation: Callable[[Tensor], Tensor] = functional.silu,
        gemm: Gemms = standard_gemm,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(experts, hidden, intermediate) < 1:
            raise ValueError(
                "experts, hidden and intermediate must be positive, "
                f"got {experts}, {hidden} and {intermediate}"
            )
        self.activation, self.gemm = activation, gemm
        self.up = nn.Parameter(torch.empty(experts, hidden, intermediate, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts, intermediate, hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weights in (self.up, self.down):
            bound = weights.shape[1] ** -0.5
            nn.init.uniform_(weights, -bound, bound)

    def forward(self, x: Tensor, rows: Sequence[int] | Tensor) -> Tensor:
        """Return the experts' outputs in the order and dtype of ``x``; computed in bfloat16."""
        up, down = self.up.to(torch.bfloat16), self.down.to(torch.bfloat16)
        between = self.activation(grouped_linear(x.to(torch.bfloat16), up, rows, self.gemm))
        return grouped_linear(between, down, rows, self.gemm).to(x.dtype)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, rows: Tensor, gemm: GroupedGemm) -> Tensor:
        x, weights = x.contiguous(), weights.contiguous()
        ctx.save_for_backward(x, weights, rows)
        ctx.gemm = gemm
        return gemm.forward(x, weights, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weights, rows = ctx.saved_tensors
        gradient = gradient.contiguous()
        needs_input, needs_weights = ctx.needs_input_grad[:2]
        return (
            ctx.gemm.input_gradient(gradient, weights, rows) if needs_input else None,
            ctx.gemm.weight_gradient(x, gradient, rows) if needs_weights else None,
            None,
            None,
        )


def _made_for(x: Tensor, weights: Tensor, gemm: Gemms) -> GroupedGemm:
    if x.dim() != 2 or weights.dim() != 3 or x.shape[1] != weights.shape[1]:
        raise ValueError(
            "grouped_linear takes x [rows, hidden] and weights [experts, hidden, intermediate], "
            f"got {list(x.shape)} and {list(weights.shape)}"
        )
    if x.dtype != torch.bfloat16 or weights.dtype != torch.bfloat16:
        raise ValueError(
            f"grouped_linear computes in bfloat16, got {x.dtype} and {weights.dtype}: convert both"
        )
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError("grouped_linear needs Triton: pip install triton", name="triton")
    from torchscout.experts.kernel.grouped_gemm import runs_on

    if not runs_on(x.device):
        raise ValueError(f"grouped_linear runs on CUDA, got a tensor on {x.device}: move the layer there")
    return gemm(weights.shape[1], weights.shape[2], x.device)


def _rows_on(rows: Sequence[int] | Tensor, x: Tensor, experts: int) -> Tensor:
    """Return the validated row counts on the device of ``x``."""
    if len(rows) != experts:
        raise ValueError(f"rows must have one number for each of {experts} experts, got {len(rows)} numbers")
    if isinstance(rows, Tensor) and rows.device == x.device and x.device.type != "cpu":
        assert_async((rows >= 0).all() & (rows.sum() == x.shape[0]))
        return rows.to(torch.int32)
    counts = [int(count) for count in rows]
    if min(counts) < 0 or sum(counts) != x.shape[0]:
        raise ValueError(f"rows must add up to the {x.shape[0]} rows of x, got {counts}")
    return torch.tensor(counts, dtype=torch.int32, device=x.device)
