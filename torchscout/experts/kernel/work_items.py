"""Names of the execution paths of a grouped GEMM (paper, section 6.2, opportunity).

``triton_kernel`` counts them.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Pass", "WorkItem"]


class Pass(Enum):
    """One launch of the kernel; a training step runs all three."""

    FORWARD = 0
    INPUT_GRADIENT = 1
    WEIGHT_GRADIENT = 2

    @property
    def word(self) -> str:
        return self.name.lower()


# [Note: the execution paths]
#
# A work item is a tile of the result, and its path depends on its position. Paths differ by: whether the tile
# extends beyond the last row or the last column and, if beyond the last row, whether rows fill its first
# half; whether a step of its reduction is partial; whether its expert has no rows (passes over rows skip it;
# its tiles of the weight gradient are zeros). Each program computes several tiles: the last one exits its
# loop, and each but the first starts with the registers and shared memory of the previous one. The most tiles
# of any program are the waves. The program that takes a path counts it; the host derives nothing from the
# shape.


class WorkItem(Enum):
    """An execution path of one pass; the value is the index of its counter."""

    INTERIOR = 0
    ROW_TAIL_LOW = 1
    """Extends beyond the last row, with less than half of its rows."""
    ROW_TAIL_HIGH = 2
    """Extends beyond the last row, with at least half of its rows."""
    COLUMN_TAIL = 3
    CORNER_LOW = 4
    """Extends beyond the last column and the last row, with less than half of its rows."""
    CORNER_HIGH = 5
    EMPTY = 6
    """An expert without rows; in the weight gradient, a tile of such an expert."""
    STEP_FULL = 7
    STEP_TAIL = 8
    """A partial last step of the reduction."""
    LAST_TILE = 9
    FOLLOWING_TILE = 10
    WAVES = 11

    @property
    def word(self) -> str:
        return self.name.lower()
