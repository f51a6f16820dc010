"""Names for checkpoints: which one, and what it is trusted for (paper, section 8). Plain data, no I/O."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

__all__ = ["Generation", "TrustLevel", "is_number"]


class TrustLevel(str, Enum):
    """What a checkpoint is to recovery."""

    LATEST = "latest"
    """The newest whole one; nothing is known about its numbers."""
    CANDIDATE = "candidate"
    """Captured after accepted evidence, and waiting for more."""
    VERIFIED = "verified"
    """Replay evidence supports its numbers."""


class Generation(NamedTuple):
    """One job-wide checkpoint: all ranks' state after the same step of the same lineage.

    A recovery goes back in steps and trains them again, perhaps with other results. Shards of step 4 from
    before and after must never be mixed, and a step alone does not tell them apart.
    """

    step: int
    lineage: int = 0
    """Recoveries before this step was trained."""

    def __str__(self) -> str:
        return f"step {self.step}" + (f" of lineage {self.lineage}" if self.lineage else "")

    @classmethod
    def from_json(cls, value: Any) -> Generation:
        if not isinstance(value, list) or len(value) != 2 or not all(is_number(each) for each in value):
            raise ValueError(f"a generation is a step and a lineage, got {value!r:.80}")
        return cls(*value)


def is_number(value: Any, lowest: int = 0) -> bool:
    """Whether this is a whole number of 63 bits, which JSON's true and false are not."""
    return type(value) is int and lowest <= value < 1 << 63
