"""The grouped GEMM of an expert layer, which can count its own execution paths (paper, section 6.2).

Rows are sorted by expert, and each expert has its own weights. There are three passes: the output, the
gradient of the input and the gradient of the weights, in bfloat16 with sums in float32. ``Projection`` has
operands for any shape; its buffers grow with the largest one. Import this module on first use, because Triton
is optional. Autograd is in ``expert_layer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchscout.experts.kernel.triton_kernel import INTERPRETED, grouped_gemm_kernel
from torchscout.experts.kernel.work_items import Pass

if TYPE_CHECKING:
    from torch import Tensor

    from torchscout.experts.coverage import Rows

__all__ = [
    "FAULT_WORDS",
    "GroupedGemm",
    "Perturbation",
    "Projection",
    "Tiling",
    "programs_of",
    "runs_on",
]

H200_PROCESSORS = 132


class Tiling(NamedTuple):
    """How a pass is divided into work items. Part of a profile's fingerprint."""

    rows: int = 128
    columns: int = 256
    step: int = 64
    """Elements of one step of the reduction."""
    group: int = 8
    """Row tiles that are computed together, column by column, to share the L2 cache."""
    warps: int = 8
    stages: int = 3

    def __str__(self) -> str:
        tile = f"{self.rows}x{self.columns}x{self.step}"
        return f"{tile} group={self.group} warps={self.warps} stages={self.stages}"


WIDE, NARROW = Tiling(), Tiling(columns=128, stages=4)


def tiling_for(columns: int) -> Tiling:
    """Depends on the columns of the result only, so that the same kernel runs for any number of rows."""
    return WIDE if columns > NARROW.columns else NARROW


def programs_of(device: torch.device) -> int:
    """Return one program for each multiprocessor; for the interpreter, as many as an H200 has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return H200_PROCESSORS


def runs_on(device: torch.device) -> bool:
    """Whether the kernel can run on this device; Triton's interpreter runs on any."""
    return INTERPRETED or device.type == "cuda"


class Perturbation(NamedTuple):
    """One perturbed work item."""

    tile: int
    """Index of the tile; -1 for none."""
    step: int = -1
    """Step of the tile's reduction; -1 for the finished tile."""


FAULT_WORDS = 8
"""Integers of a fault on the device: tile and step, then the kernel's results: times fired, path of the tile,
path of the step (0 for none). The rest aligns the next fault."""


class GroupedGemm:
    """The passes of one projection, from ``hidden`` to ``intermediate`` features."""

    def __init__(
        self, hidden: int, intermediate: int, *, programs: int, tiling: Tiling | None = None
    ) -> None:
        if min(hidden, intermediate, programs) < 1:
            raise ValueError(
                "hidden, intermediate and programs must be positive, "
                f"got {hidden}, {intermediate} and {programs}"
            )
        self.hidden, self.intermediate, self.programs = hidden, intermediate, programs
        self.tilings = {
            Pass.FORWARD: tiling or tiling_for(intermediate),
            Pass.INPUT_GRADIENT: tiling or tiling_for(hidden),
            Pass.WEIGHT_GRADIENT: tiling or tiling_for(intermediate),
        }

    def forward(self, x: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        """Return ``x @ weights[expert]`` for the rows of each expert, whose numbers are ``rows``."""
        out = x.new_empty(x.shape[0], self.intermediate)
        self.launch(Pass.FORWARD, (x, weights, out), rows)
        return out

    def input_gradient(self, gradient: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        """Return ``gradient @ weights[expert].T`` for the rows of each expert."""
        out = gradient.new_empty(gradient.shape[0], self.hidden)
        self.launch(Pass.INPUT_GRADIENT, (gradient, weights, out), rows)
        return out

    def weight_gradient(self, x: Tensor, gradient: Tensor, rows: Tensor) -> Tensor:
        """Return ``x.T @ gradient`` over the rows of each expert; zeros if it has none."""
        out = x.new_empty(rows.shape[0], self.hidden, self.intermediate)
        self.launch(Pass.WEIGHT_GRADIENT, (x, gradient, out), rows)
        return out

    def launch(
        self,
        which: Pass,
        operands: tuple[Tensor, Tensor, Tensor],
        rows: Tensor,
        *,
        counters: Tensor | None = None,
        fault: Tensor | None = None,
    ) -> Any:
        """Run one pass on two operands and a result. Return the compiled kernel; None in the interpreter.

        Adds to ``counters``, one int32 for each ``WorkItem``. ``fault`` has ``FAULT_WORDS`` of int32.
        """
        assert all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in operands)
        assert rows.dtype == torch.int32, rows.dtype
        tiling = self.tilings[which]
        return grouped_gemm_kernel[(self.programs,)](
            *operands,
            rows,
            rows.shape[0],
            self.hidden,
            self.intermediate,
            rows if counters is None else counters,
            rows if fault is None else fault,
            PASS=which.value,
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            STEP=tiling.step,
            GROUP=tiling.group,
            COUNT=counters is not None,
            INJECT=fault is not None,
            WIDEN=INTERPRETED,  # the interpreter would multiply bfloat16 bits as integers
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )


class Projection:
    """``experts`` matrices of ``hidden`` by ``intermediate``, with random rows for them."""

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
            raise ValueError(f"a projection needs at least one expert, got experts={experts}")
        self.device = torch.device(device)
        if not runs_on(self.device):
            raise ValueError(
                f"the grouped GEMM runs on CUDA, got device={str(device)!r}: use a CUDA device, or set "
                "TRITON_INTERPRET=1 before Triton is imported"
            )
        self.experts = experts
        self.gemm = GroupedGemm(
            hidden, intermediate, programs=programs or programs_of(self.device), tiling=tiling
        )
        self._weights = self._random(experts, hidden, intermediate, scale=hidden**-0.5)
        self._weight_gradient = torch.empty_like(self._weights)
        self._capacity = 0

    def place(self, rows: Rows) -> Tensor:
        """Return the row counts on the device, and allocate operands for them."""
        if len(rows) != self.experts or min(rows) < 0:
            raise ValueError(f"a shape needs {self.experts} row counts, none negative, got {rows}")
        self._reserve(sum(rows))
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    def execute(
        self, which: Pass, rows: Tensor, *, counters: Tensor | None = None, fault: Tensor | None = None
    ) -> Any:
        """Run one pass on ``rows`` from ``place``. Return the compiled kernel."""
        return self.gemm.launch(which, self._operands(which), rows, counters=counters, fault=fault)

    def result(self, which: Pass, rows: Rows) -> Tensor:
        """Return the result of the last execution of a pass on this shape; overwritten by the next one."""
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
        # A small gradient keeps sums over many rows near 1, so that every fault is visible in bfloat16.
        self._x = self._random(self._capacity, self.gemm.hidden)
        self._gradient = self._random(self._capacity, self.gemm.intermediate, scale=0.125)
        self._output, self._input_gradient = torch.empty_like(self._gradient), torch.empty_like(self._x)

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        seed = len(shape) + round(1 / scale)  # different for each operand
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=generator)
        return values.mul_(scale)
