"""A fault inside the kernel of experts, as plain data (paper, evaluation: MoE kernel-role SDC)."""

from __future__ import annotations

from dataclasses import dataclass

from torchscout.faults.process_effects import ProcessEffect

__all__ = ["PerturbKernel"]


@dataclass(frozen=True, slots=True)
class PerturbKernel(ProcessEffect):
    """From here on this process computes one work item wrong, in each launch that has such a one.

    For experts whose kernel is a ``SickGemm``.
    """

    tile: int = 0
    """In the order in which programs take tiles."""
    step: int = -1
    """Of the tile's reduction; -1 is the finished tile."""

    def happen(self) -> None:
        from torchscout.faults.sick_gemm import fall_ill  # it needs Triton, a plan of faults does not

        fall_ill(self.tile, self.step)
