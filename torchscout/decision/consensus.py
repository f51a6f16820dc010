"""The rules by which peers find an outlier (paper, section 5, algorithm 1).

Pure functions over gathered evidence: no tensors, no process groups. Diagnoses decide what a disagreement
means, and whether it matters.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from torchscout.config import KAPPA, MATERIAL_RATIO

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["Status", "Verdict", "exact", "known", "robust_scale", "statistical"]

_Value = TypeVar("_Value")


class Status(str, Enum):
    AGREE = "agree"
    """The evidence satisfies the rule."""
    ATTRIBUTED = "attributed"
    """The rule names one or more outliers."""
    INCONCLUSIVE = "inconclusive"
    """Peers disagree, and no majority decides which are right."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The conclusion of the peers: R = (s, B, E) in the paper."""

    status: Status
    outliers: tuple[int, ...]
    """Positions in the peer group, ascending; empty unless attributed."""
    evidence: tuple[Hashable, ...]
    """What each peer reported, in peer order."""

    @property
    def bitmap(self) -> tuple[int, ...]:
        """One bit per peer, 1 for an outlier."""
        marked = set(self.outliers)
        return tuple(int(position in marked) for position in range(len(self.evidence)))

    @property
    def agrees(self) -> bool:
        return self.status is Status.AGREE


def exact(values: Sequence[Hashable]) -> Verdict:
    """Compare values that healthy peers produce identically."""
    evidence = _evidence(values)
    if evidence.count(evidence[0]) == len(evidence):  # fast path: a check compares thousands
        return Verdict(Status.AGREE, (), evidence)
    majority, count = Counter(evidence).most_common(1)[0]
    if 2 * count <= len(evidence):
        return Verdict(Status.INCONCLUSIVE, (), evidence)
    return _verdict(evidence, [value != majority for value in evidence])


def known(values: Sequence[Hashable], right: Hashable) -> Verdict:
    """Compare each value with the right one, if that is known without a vote; any number may differ."""
    evidence = _evidence(values)
    return _verdict(evidence, [value != right for value in evidence])


def statistical(values: Sequence[float], *, kappa: float = KAPPA, ratio: float = MATERIAL_RATIO) -> Verdict:
    """Compare durations: an outlier is more than ``kappa`` robust scales from the median.

    A duration that is not finite never agrees. Two peers have no majority: if they differ by more than
    ``ratio``, the verdict is inconclusive.
    """
    if kappa <= 0:
        raise ValueError(f"kappa must be positive, got {kappa}")
    evidence = _evidence(values)
    finite = [value for value in evidence if math.isfinite(value)]
    if 2 * len(finite) <= len(evidence) or (len(finite) == 2 and max(finite) > ratio * min(finite)):
        return Verdict(Status.INCONCLUSIVE, (), evidence)
    center, reach = statistics.median(finite), kappa * robust_scale(finite)
    return _verdict(evidence, [not math.isfinite(value) or abs(value - center) > reach for value in evidence])


def robust_scale(values: Sequence[float]) -> float:
    """Return a dispersion that a few extremes cannot dominate; zero only if all values are equal."""
    center = statistics.median(values)
    if mad := statistics.median(abs(value - center) for value in values):
        return 1.4826 * mad  # the standard deviation of normally distributed values
    # More than half of the values are equal. Quartiles are rounded inward: interpolated ones would include
    # part of the extreme value of [1, 1, 100].
    ordered, last = sorted(values), len(values) - 1
    if spread := ordered[math.floor(0.75 * last)] - ordered[math.ceil(0.25 * last)]:
        return spread / 1.349
    return (ordered[-1] - ordered[0]) / 10


def _evidence(values: Sequence[_Value]) -> tuple[_Value, ...]:
    if not values:
        raise ValueError("consensus needs the evidence of at least one peer, got none")
    return tuple(values)


def _verdict(evidence: tuple[Hashable, ...], marks: Sequence[bool]) -> Verdict:
    outliers = tuple(position for position, marked in enumerate(marks) if marked)
    return Verdict(Status.ATTRIBUTED if outliers else Status.AGREE, outliers, evidence)
