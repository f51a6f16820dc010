"""The synthetic training that a preflight checks: GEMMs of several shapes and precisions, attention, updates.

Every rank trains the same model on the same batches, without exchanging gradients, so that all ranks are
replicas of each other and a wrong result stays on the rank that computed it.

[Note: repeatable kernels] Results are compared bitwise, so every kernel must be deterministic. Fused
attention on CUDA is so only under strict deterministic algorithms, and only with the flash backend; cuBLAS
needs ``CUBLAS_WORKSPACE_CONFIG``. Both are set before the first kernel runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  as everybody writes it
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchscout.replay.capture.context import deterministic
from torchscout.utils._torch import scaled_mm

__all__ = ["LARGE", "SMALL", "TF32", "Size", "Workload", "precisions_on"]

TF32 = "tf32"
_FP8 = "float8_e4m3fn"
_FP8_CAPABILITY = (8, 9)
_SEED = 20
_LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Size:
    """How large the synthetic layers are."""

    rows: int
    """Rows of a batch, which are also the positions that attention covers."""
    width: int
    heads: int
    inner: tuple[int, ...]
    """Inner widths of the GEMM layers: each is one shape of both its GEMMs."""


LARGE = Size(rows=4096, width=4096, heads=32, inner=(4096, 11008))
"""For accelerators: layers of a model with 7 billion parameters."""
SMALL = Size(rows=128, width=128, heads=4, inner=(128, 352))


def precisions_on(device: torch.device) -> tuple[str, ...]:
    """Return the precisions in which this device multiplies matrices."""
    if device.type != "cuda":
        return ("float32", "float64")
    has_fp8 = scaled_mm is not None and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
    return ("float32", TF32, "bfloat16", "float16", *([_FP8] if has_fp8 else []))


class Workload:
    """The model of one rank, its optimizer, and its training steps."""

    def __init__(self, device: torch.device, size: Size | None = None) -> None:
        self.device = device
        self.size = size or (LARGE if device.type == "cuda" else SMALL)
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            self.model = Model(self.size, precisions_on(device)).to(device)
        # The update on CUDA is one fused kernel, as in large jobs.
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, fused=fused)
        self._batches = torch.Generator(device)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers in the model."""
        return tuple(f"layers.{name}" for name in self.model.layers)

    def backward(self, step: int) -> None:
        """Compute the gradients of one step. The batch depends on the step only."""
        shape = self.size.rows, self.size.width
        self._batches.manual_seed(_SEED + step)
        batch = torch.randn(shape, generator=self._batches, device=self.device)
        self.optimizer.zero_grad()
        with deterministic():  # see [Note: repeatable kernels]
            self.model(batch).square().mean().backward()


class Model(nn.Module):
    """Residual layers: each kind of GEMM in each precision, and attention."""

    def __init__(self, size: Size, precisions: tuple[str, ...]) -> None:
        super().__init__()
        layers: dict[str, nn.Module] = {
            f"gemm_{precision}_{size.rows}x{size.width}x{inner}": Gemms(size.width, inner, precision)
            for precision in precisions
            for inner in size.inner
        }
        layers |= {
            f"attention_{backend}": Attention(size.width, size.heads, backend) for backend in _BACKENDS
        }
        self.layers = nn.ModuleDict(layers)
        self._width = size.width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + layer(F.layer_norm(x, (self._width,)))
        return x


class Gemms(nn.Module):
    """Two matrices. Forward and backward are six GEMMs of one precision."""

    def __init__(self, width: int, inner: int, precision: str) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(inner, width, device="cpu") * width**-0.5)
        self.down = nn.Parameter(torch.randn(width, inner, device="cpu") * inner**-0.5)
        self._precision = precision

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(_product(x, self.up, self._precision))
        return _product(inner, self.down, self._precision)


def _product(x: torch.Tensor, weight: torch.Tensor, precision: str) -> torch.Tensor:
    product: torch.Tensor = _Product.apply(x, weight, precision)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    """``x @ weight.T`` in one precision; so are the two products of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, precision: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.precision = precision
        return _multiply(x, weight.t(), precision)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        return _multiply(gradient, weight, ctx.precision), _multiply(gradient.t(), x, ctx.precision), None


def _multiply(a: torch.Tensor, b: torch.Tensor, precision: str) -> torch.Tensor:
    if precision == TF32:
        with _tf32():
            return a @ b
    dtype: torch.dtype = getattr(torch, precision)
    if precision == _FP8:
        return _multiply_fp8(a, b, dtype)
    return (a.to(dtype) @ b.to(dtype)).float()


def _multiply_fp8(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scale both to the range of the format; the second operand is stored column by column."""
    largest = torch.finfo(dtype).max
    scales = [(each.abs().amax() / largest).clamp(min=1e-12).float() for each in (a, b)]
    left = (a / scales[0]).to(dtype).contiguous()
    right = (b / scales[1]).to(dtype).t().contiguous().t()
    product: torch.Tensor = scaled_mm(left, right, scales[0], scales[1], out_dtype=torch.bfloat16)
    return product.float()


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


_BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
"""See [Note: repeatable kernels]."""


class Attention(nn.Module):
    """Causal attention over all rows of the batch; the flash backend of CUDA has no float32."""

    def __init__(self, width: int, heads: int, backend: str) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width, bias=False)
        self._heads, self._backend = heads, backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16 if x.is_cuda and self._backend == "flash" else torch.float32
        projected = self.project(x).to(dtype).view(len(x), 3, self._heads, -1)
        query, key, value = projected.permute(1, 2, 0, 3).unsqueeze(1)
        with sdpa_kernel(_BACKENDS[self._backend]):
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended[0].transpose(0, 1).flatten(1).float()
