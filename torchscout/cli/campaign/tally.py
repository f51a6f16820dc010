"""Figures of a table: shares with their confidence interval, medians, percentiles. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["interval", "percentile"]

_QUANTILE = 1.959963984540054
"""Of the normal distribution, for 95 %."""


def interval(passed: int, total: int) -> tuple[float, float]:
    """Wilson's score interval, 95 %: between which shares the true one may lie, also where all passed."""
    if total == 0:
        return 0.0, 1.0
    share, squared = passed / total, _QUANTILE**2
    middle = share + squared / (2 * total)
    reach = _QUANTILE * math.sqrt(share * (1 - share) / total + squared / (4 * total**2))
    scale = 1 + squared / total
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def percentile(values: Sequence[float], share: float) -> float | None:
    """By nearest rank; None where there are no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
