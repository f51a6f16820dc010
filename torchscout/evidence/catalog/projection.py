"""One projection with operands of its own, so that any shape can be executed at once (paper, section 6.2).

Buffers are kept and grow with the largest shape; what executions show is read in ``kernel_profiler`` and
``injection``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchscout.evidence.catalog.grouped_gemm import GroupedGemm, Tiling, programs_of, runs_on
from torchscout.evidence.catalog.roles import Pass

if TYPE_CHECKING:
    from torch import Tensor

    from torchscout.evidence.catalog.profile import Rows

__all__ = ["Projection"]


class Projection:
    """``experts`` matrices of ``hidden`` by ``intermediate``, and rows for them."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        *,
        device: torch.device | str,
        programs: int | None = None,
        tiling: Tiling | None = None,
    ) -> None:
        if experts < 1:
            raise ValueError(f"a projection needs an expert at least, got experts={experts}")
        self.device = torch.device(device)
        if not runs_on(self.device):
            raise ValueError(
                f"the grouped GEMM runs on CUDA, got device={str(device)!r}: name a CUDA device, or set "
                "TRITON_INTERPRET=1 before Triton is imported to have it interpreted"
            )
        self.experts = experts
        self.gemm = GroupedGemm(
            hidden, intermediate, programs=programs or programs_of(self.device), tiling=tiling
        )
        self._weights = self._random(experts, hidden, intermediate, scale=hidden**-0.5)
        self._weight_gradient = torch.empty_like(self._weights)
        self._capacity = 0

    def place(self, rows: Rows) -> Tensor:
        """The row counts on the device; makes room for them all."""
        if len(rows) != self.experts or min(rows) < 0:
            raise ValueError(f"a shape here has {self.experts} row counts, none negative, got {rows}")
        self._reserve(sum(rows))
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    def execute(
        self, which: Pass, rows: Tensor, *, counters: Tensor | None = None, fault: Tensor | None = None
    ) -> Any:
        """Run one pass on rows that were placed; gives the compiled kernel."""
        return self.gemm.launch(which, self._operands(which), rows, counters=counters, fault=fault)

    def result(self, which: Pass, rows: Rows) -> Tensor:
        """What the last execution of a pass on this shape wrote; overwritten by the next."""
        whole = self._operands(which)[2]
        return whole if which is Pass.WEIGHT_GRADIENT else whole[: sum(rows)]

    def _operands(self, which: Pass) -> tuple[Tensor, Tensor, Tensor]:
        if which is Pass.FORWARD:
            return self._x, self._weights, self._output
        if which is Pass.INPUT_GRADIENT:
            return self._gradient, self._weights, self._input_gradient
        return self._x, self._gradient, self._weight_gradient

    def _reserve(self, rows: int) -> None:
        if self._capacity and rows <= self._capacity:
            return
        self._capacity = max(rows, 2 * self._capacity, 1)
        # The gradient is small, so that sums over many rows stay near 1 and every fault shows in bfloat16.
        self._x = self._random(self._capacity, self.gemm.hidden)
        self._gradient = self._random(self._capacity, self.gemm.intermediate, scale=0.125)
        self._output, self._input_gradient = torch.empty_like(self._gradient), torch.empty_like(self._x)

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(
            len(shape) + round(1 / scale)
        )  # unlike the others
        values = torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=generator)
        return values.mul_(scale)
