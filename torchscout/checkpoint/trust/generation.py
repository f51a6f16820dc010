"""Names a checkpoint and how far it is trusted (paper, section 8)."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

__all__ = ["Generation", "TrustLevel", "is_number"]


class TrustLevel(str, Enum):
    """How far recovery trusts a checkpoint."""

    LATEST = "latest"
    """The newest complete checkpoint; nothing is known about its numbers."""
    CANDIDATE = "candidate"
    """Captured after an accepted cycle of checks; another cycle must follow."""
    VERIFIED = "verified"
    """Replay evidence supports its numbers."""


class Generation(NamedTuple):
    """One job-wide checkpoint: all ranks' state after the same step of the same lineage.

    After a recovery steps are trained again, perhaps with different results. The lineage distinguishes them,
    so that shards of step 4 from before and after a recovery are never mixed.
    """

    step: int
    lineage: int = 0
    """The number of recoveries before this step was trained."""

    def __str__(self) -> str:
        return f"step {self.step}" + (f" of lineage {self.lineage}" if self.lineage else "")

    @classmethod
    def from_json(cls, value: Any) -> Generation:
        if not isinstance(value, list) or len(value) != 2 or not all(is_number(each) for each in value):
            raise ValueError(f"a generation is a step and a lineage, got {value!r:.80}")
        return cls(*value)


def is_number(value: Any, lowest: int = 0) -> bool:
    """Whether this is an ``int``, not a ``bool``, from ``lowest`` to 2**63 - 1."""
    return type(value) is int and lowest <= value < 1 << 63
