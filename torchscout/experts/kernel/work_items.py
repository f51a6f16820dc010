"""What the work inside a grouped GEMM can be (paper, section 6.2, opportunity).

Names and their order only; ``triton_kernel`` sees and counts them.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Pass", "WorkItem"]


class Pass(Enum):
    """One launch of the kernel; a step of training runs all three."""

    FORWARD = 0
    INPUT_GRADIENT = 1
    WEIGHT_GRADIENT = 2

    @property
    def word(self) -> str:
        return self.name.lower()


# [Note: the roles of work]
#
# A work item is a tile of the result, and what it does depends on where it lies. Told apart are: whether the
# tile is cut off by the last row or the last column, and if by the last row, whether rows fill its first
# half; whether a step of its reduction is cut off; whether its expert has no rows (the passes over rows
# have no tile for it and pass it by; the weight gradient has tiles that are zeros). Programs take
# tiles in turn: the last tile of a program is the way out of its loop, any but the first follows another one
# with registers and shared memory as that one left them, and the most tiles of any program are the waves.
# Each is counted where it happens, by the program that does it; the host derives nothing from the shape.


class WorkItem(Enum):
    """An execution path of one pass; the value is its place among the counters."""

    INTERIOR = 0
    ROW_TAIL_LOW = 1
    """Cut off by the last row, before its first half is full."""
    ROW_TAIL_HIGH = 2
    """Cut off by the last row, in its second half."""
    COLUMN_TAIL = 3
    CORNER_LOW = 4
    """Cut off by the last column, and by the last row before its first half is full."""
    CORNER_HIGH = 5
    EMPTY = 6
    """An expert without rows that is passed by; in the weight gradient, a tile of such an expert."""
    STEP_FULL = 7
    STEP_TAIL = 8
    """A step that the end of the reduction cuts off."""
    LAST_TILE = 9
    FOLLOWING_TILE = 10
    WAVES = 11

    @property
    def word(self) -> str:
        return self.name.lower()
