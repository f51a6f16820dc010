"""What executing one expert shape did on the device (paper, section 6.2, shape coverage).

How a profile is measured is a profiler's business; which shapes are kept ``cover`` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Profiler", "Rows", "ShapeProfile", "uniform"]

Rows = tuple[int, ...]
"""The rows of each expert in one execution of the kernel."""


@dataclass(frozen=True, slots=True)
class ShapeProfile:
    """The paper's F and c of one shape."""

    fingerprint: str
    """Canonical text: equal text is the same kernel, configuration, schedule and pressure regime."""
    path_counts: tuple[tuple[str, int], ...]
    """How often each execution path ran, sorted by path; a path that never ran is not listed."""

    def __post_init__(self) -> None:
        counts = dict(self.path_counts)
        assert len(counts) == len(self.path_counts), f"a path is listed twice: {self.path_counts}"
        assert all(count >= 0 for count in counts.values()), f"a path ran less than never: {counts}"
        ran = tuple(sorted((path, count) for path, count in counts.items() if count))
        object.__setattr__(self, "path_counts", ran)  # equal executions are equal profiles, however listed

    @classmethod
    def of(cls, fingerprint: str, counts: Mapping[str, int]) -> ShapeProfile:
        return cls(fingerprint, tuple(counts.items()))

    def covers(self, other: ShapeProfile) -> bool:
        """Whether every path that ``other`` takes is taken here in the same regime, at least as often."""
        if self.fingerprint != other.fingerprint:
            return False
        here = dict(self.path_counts)
        return all(here.get(path, 0) >= count for path, count in other.path_counts)

    @property
    def occurrences(self) -> int:
        """Times that any path ran."""
        return sum(count for _, count in self.path_counts)


class Profiler(Protocol):
    """Runs the production expert implementation and sees what it does."""

    def facts(self) -> Mapping[str, str]:
        """What decides which kernel runs: device, driver, versions, kernel source, dimensions, dtype.

        Called before the first shape; the same answer as long as the profiler lives.
        """
        ...

    def profile(self, rows: Rows) -> ShapeProfile | None:
        """Execute this shape once: forward, input gradient, weight gradient.

        Called several times for each shape. None where the paths taken cannot be counted; an attribute
        ``reason``, where a profiler has one, then says why.
        """
        ...


def uniform(rows: int, experts: int) -> Rows:
    """The shape that gives each expert the same number of rows."""
    return (rows,) * experts
