"""The rules by which peers find an outlier (paper, section 5, algorithm 1).

Pure functions over gathered evidence: no tensors, no process groups. Diagnoses decide what a disagreement
means, and whether it matters.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torchscout.config import KAPPA, MATERIAL_RATIO
from torchscout.decision.types import Status, Verdict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "MANY",
    "Dispersion",
    "Status",
    "Unanimous",
    "Verdict",
    "all_equal",
    "dispersion_of",
    "exact",
    "known",
    "median",
    "robust_scale",
    "statistical",
]

MANY = 64
"""From so many peers on, values are compared as arrays."""

_Value = TypeVar("_Value")


class _Many(Sequence[_Value]):
    """What many peers reported: equal to a tuple, without thousands of objects that are seldom read."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, _Many) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class Unanimous(_Many[_Value]):
    """One value that all peers reported."""

    __slots__ = ("_peers", "_value")

    def __init__(self, value: _Value, peers: int) -> None:
        self._value, self._peers = value, peers

    def __len__(self) -> int:
        return self._peers

    def __getitem__(self, place: Any) -> Any:
        places = range(self._peers)[place]
        return self._value if isinstance(places, int) else (self._value,) * len(places)

    def __iter__(self) -> Iterator[_Value]:
        return repeat(self._value, self._peers)

    def __contains__(self, value: object) -> bool:
        return value == self._value

    def count(self, value: object) -> int:
        return self._peers if value == self._value else 0


class _Durations(_Many[float]):
    """Durations in an array that is never modified."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: npt.NDArray[np.float64]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        found = self._numbers[place].tolist()
        return tuple(found) if isinstance(place, slice) else found

    def __iter__(self) -> Iterator[float]:
        return iter(self._numbers.tolist())


class Dispersion(NamedTuple):
    """The median of some values, and their ``robust_scale``."""

    center: float
    scale: float


def exact(values: Sequence[Hashable]) -> Verdict:
    """Compare values that healthy peers produce identically."""
    evidence = _evidence(values)
    if all_equal(evidence):
        return Verdict(Status.AGREE, (), evidence)
    majority, count = Counter(evidence).most_common(1)[0]
    if 2 * count <= len(evidence):
        return Verdict(Status.INCONCLUSIVE, (), evidence)
    return _verdict(evidence, [value != majority for value in evidence])


def known(values: Sequence[Hashable], right: Hashable) -> Verdict:
    """Compare each value with the right one, if that is known without a vote; any number may differ."""
    evidence = _evidence(values)
    if evidence[0] == right and all_equal(evidence):
        return Verdict(Status.AGREE, (), evidence)
    return _verdict(evidence, [value != right for value in evidence])


def all_equal(values: Sequence[Hashable]) -> bool:
    """Whether all peers have the same value; fast, because a check compares thousands."""
    return values.count(values[0]) == len(values)


def statistical(
    values: Sequence[float] | npt.NDArray[np.float64],
    *,
    kappa: float = KAPPA,
    ratio: float = MATERIAL_RATIO,
    dispersion: Dispersion | None = None,
) -> Verdict:
    """Compare durations: an outlier is more than ``kappa`` robust scales from the median.

    A duration that is not finite never agrees. Two peers have no majority: if they differ by more than
    ``ratio``, the verdict is inconclusive. ``dispersion`` is that of the values, if it is known already and
    all of them are finite.
    """
    if kappa <= 0:
        raise ValueError(f"kappa must be positive, got {kappa}")
    if len(values) >= MANY:
        return _statistical(values, kappa, dispersion)
    evidence = _evidence([*values])
    finite = [value for value in evidence if math.isfinite(value)]
    if 2 * len(finite) <= len(evidence) or (len(finite) == 2 and max(finite) > ratio * min(finite)):
        return Verdict(Status.INCONCLUSIVE, (), evidence)
    center, reach = statistics.median(finite), kappa * robust_scale(finite)
    return _verdict(evidence, [not math.isfinite(value) or abs(value - center) > reach for value in evidence])


def _statistical(
    values: Sequence[float] | npt.NDArray[np.float64], kappa: float, dispersion: Dispersion | None
) -> Verdict:
    """The same rule for many peers."""
    import numpy as np  # not above, because observers import this module and must stay small

    times = np.array(values, np.float64)
    evidence = _Durations(times)
    if dispersion is None:
        finite = times[np.isfinite(times)]
        if 2 * len(finite) <= len(times):
            return Verdict(Status.INCONCLUSIVE, (), evidence)
        dispersion = dispersion_of(finite)
    center, scale = dispersion
    with np.errstate(invalid="ignore"):
        agrees = np.abs(times - center) <= kappa * scale  # what is not finite does not
    outliers = () if agrees.all() else tuple(np.flatnonzero(~agrees).tolist())
    return Verdict(Status.ATTRIBUTED if outliers else Status.AGREE, outliers, evidence)


def robust_scale(values: Sequence[float] | npt.NDArray[np.float64], center: float | None = None) -> float:
    """Return a dispersion that a few extremes cannot dominate; zero only if all values are equal.

    ``center`` is the median of the values, if it is known already.
    """
    if len(values) >= MANY:
        return _robust_scale(values, center)
    ordered: list[float] = sorted(values)
    center, last = statistics.median(ordered), len(ordered) - 1
    if mad := statistics.median(abs(value - center) for value in ordered):
        return 1.4826 * mad  # the standard deviation of normally distributed values
    # More than half of the values are equal. Quartiles are rounded inward: interpolated ones would include
    # part of the extreme value of [1, 1, 100].
    if spread := ordered[math.floor(0.75 * last)] - ordered[math.ceil(0.25 * last)]:
        return spread / 1.349
    return (ordered[-1] - ordered[0]) / 10


def _robust_scale(values: Sequence[float] | npt.NDArray[np.float64], center: float | None) -> float:
    """The same dispersion of many values."""
    import numpy as np

    many = np.asarray(values, np.float64)
    if mad := median(np.abs(many - (median(many) if center is None else center))):
        return 1.4826 * mad
    ordered: list[float] = np.sort(many).tolist()
    last = len(ordered) - 1
    if spread := ordered[math.floor(0.75 * last)] - ordered[math.ceil(0.25 * last)]:
        return spread / 1.349
    return (ordered[-1] - ordered[0]) / 10


def dispersion_of(values: npt.NDArray[np.float64]) -> Dispersion:
    """Return the median and the ``robust_scale`` of finite values."""
    center = median(values)
    return Dispersion(center, robust_scale(values, center))


def median(values: npt.NDArray[np.float64]) -> float:
    """Return the median of finite values, in half the time of ``numpy.median``."""
    import numpy as np

    half = len(values) // 2
    ordered = np.partition(values, half)
    upper = float(ordered[half])
    return upper if len(values) % 2 else (upper + float(ordered[:half].max())) / 2


def _evidence(values: Sequence[_Value]) -> Sequence[_Value]:
    if not values:
        raise ValueError("consensus needs the evidence of at least one peer, got none")
    return values if isinstance(values, Unanimous) else tuple(values)


def _verdict(evidence: Sequence[Hashable], marks: Sequence[bool]) -> Verdict:
    outliers = tuple(position for position, marked in enumerate(marks) if marked)
    return Verdict(Status.ATTRIBUTED if outliers else Status.AGREE, outliers, evidence)
