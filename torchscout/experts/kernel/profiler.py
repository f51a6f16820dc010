"""Profiles the grouped GEMM with the counters that it increments while it runs (paper, section 6.2).

Each profile is one real execution of the three passes of one projection; an expert with two projections has
two tables. Nothing is derived from the shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from torchscout.experts.catalog import device_facts
from torchscout.experts.coverage import Rows, ShapeProfile
from torchscout.experts.kernel import grouped_gemm, triton_kernel
from torchscout.experts.kernel.grouped_gemm import Projection
from torchscout.experts.kernel.work_items import Pass, WorkItem

if TYPE_CHECKING:
    from torchscout.experts.kernel.grouped_gemm import GroupedGemm, Tiling

__all__ = ["KernelProfiler", "Regime", "kernel_facts"]

Regime = Literal["pressure", "waves"]
"""Which pressure two executions must share to be compared, in each pass: whether any multiprocessor was idle;
or, more strictly, the number of tiles of the busiest one."""

_COUNTERS = 16
"""Integers for each pass: one for each ``WorkItem``, and padding to align the next pass."""


class KernelProfiler:
    """Counts the paths of one projection, on CUDA or in Triton's interpreter."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int = 1,
        *,
        device: torch.device | str = "cuda",
        regime: Regime = "pressure",
        programs: int | None = None,
        tiling: Tiling | None = None,
    ) -> None:
        if regime not in ("pressure", "waves"):
            raise ValueError(f"regime must be 'pressure' or 'waves', got {regime!r}")
        self.projection = Projection(
            hidden, intermediate, experts, device=device, programs=programs, tiling=tiling
        )
        self._regime = regime
        self._counters = torch.zeros(len(Pass), _COUNTERS, dtype=torch.int32, device=self.projection.device)

    def facts(self) -> dict[str, str]:
        """Return what profiles depend on besides the rows."""
        return kernel_facts(
            self.projection.gemm, self.projection.experts, self.projection.device, self._regime
        )

    def profile(self, rows: Rows) -> ShapeProfile:
        """Execute all three passes of this shape once, and read the counters."""
        placed = self.projection.place(rows)
        self._counters.zero_()
        kernels = [
            self.projection.execute(which, placed, counters=self._counters[which.value]) for which in Pass
        ]
        counted = self._counters.tolist()
        names = [str(getattr(kernel, "hash", "interpreted"))[:12] for kernel in kernels]
        return ShapeProfile(
            fingerprint=self._fingerprint(names, counted),
            path_counts=tuple(
                sorted(
                    (f"{which.word}/{role.word}", counted[which.value][role.value])
                    for which in Pass
                    for role in WorkItem
                )
            ),
        )

    def _fingerprint(self, kernels: Sequence[str], counted: Sequence[Sequence[int]]) -> str:
        gemm = self.projection.gemm
        passes = [
            f"{which.word} kernel={kernel} {gemm.tilings[which]} {self._pressure(counts)}"
            for which, kernel, counts in zip(Pass, kernels, counted, strict=True)
        ]
        return "; ".join([f"grouped_gemm bfloat16 programs={gemm.programs}", *passes])

    def _pressure(self, counted: Sequence[int]) -> str:
        if self._regime == "waves":
            return f"waves={counted[WorkItem.WAVES.value]}"
        # Every program that computed a tile has computed a last one.
        return "full" if counted[WorkItem.LAST_TILE.value] == self.projection.gemm.programs else "idle"


def kernel_facts(gemm: GroupedGemm, experts: int, device: torch.device, regime: str) -> dict[str, str]:
    """Return what profiles of a projection depend on besides the rows."""
    return {
        **device_facts(device),
        "kernel": _source_digest(),
        "hidden": str(gemm.hidden),
        "intermediate": str(gemm.intermediate),
        "experts": str(experts),
        "dtype": "bfloat16",
        "programs": str(gemm.programs),
        "regime": regime,
        **{f"{which.word} tiling": str(tiling) for which, tiling in gemm.tilings.items()},
    }


def _source_digest() -> str:
    """Return the digest of the kernel's source files."""
    digest = hashlib.sha256()
    for module in (grouped_gemm, triton_kernel):
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()
