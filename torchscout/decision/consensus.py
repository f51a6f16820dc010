"""The rules by which peers find an outlier (paper, section 5, algorithm 1).

Pure functions over gathered evidence: no tensors, no process groups. Diagnoses decide what a disagreement
means, and whether it matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

from torchscout.config import KAPPA, MATERIAL_RATIO
from torchscout.decision.types import Status, Verdict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Floats = npt.NDArray[np.float64]

__all__ = [
    "Status",
    "Unanimous",
    "Verdict",
    "all_equal",
    "dispersions",
    "exact",
    "known",
    "robust_scale",
    "statistical",
]

_Value = TypeVar("_Value")


class _Many(Sequence[_Value]):
    """A sequence that compares equal to a tuple, without an object for each peer."""

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

    def __init__(self, numbers: _Floats) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        found = self._numbers[place].tolist()
        return tuple(found) if isinstance(place, slice) else found

    def __iter__(self) -> Iterator[float]:
        return iter(self._numbers.tolist())


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
) -> Verdict:
    """Compare durations: an outlier is more than ``kappa`` robust scales from the median.

    A duration that is not finite never agrees. Two peers have no majority: if they differ by more than
    ``ratio``, the verdict is inconclusive.
    """
    import numpy as np  # not above, because observers import this module and must stay small

    if kappa <= 0:
        raise ValueError(f"kappa must be positive, got {kappa}")
    if not len(values):
        raise ValueError("consensus needs the evidence of at least one peer, got none")
    times = np.array(values, np.float64)
    evidence = _Durations(times)
    finite = times[np.isfinite(times)]
    if 2 * len(finite) <= len(times) or (len(finite) == 2 and finite.max() > ratio * finite.min()):
        return Verdict(Status.INCONCLUSIVE, (), evidence)
    center, scale = (float(each[0]) for each in dispersions(finite[np.newaxis]))
    with np.errstate(invalid="ignore"):
        agrees = np.abs(times - center) <= kappa * scale  # what is not finite does not
    outliers = tuple(np.flatnonzero(~agrees).tolist())
    return Verdict(Status.ATTRIBUTED if outliers else Status.AGREE, outliers, evidence)


def robust_scale(values: Iterable[float]) -> float:
    """Return a dispersion that a few extremes cannot dominate; zero only if all values are equal."""
    import numpy as np

    return float(dispersions(np.array([[*values]], np.float64))[1][0])


def dispersions(rows: _Floats) -> tuple[_Floats, _Floats]:
    """Return the median and the robust scale of each row, without its NaN, which are at least one number."""
    import numpy as np

    ordered = np.sort(rows, axis=1)  # NaN come last
    counts = np.count_nonzero(~np.isnan(ordered), axis=1)
    center = _middle(ordered, counts)
    deviations = np.sort(np.abs(ordered - center[:, np.newaxis]), axis=1)
    scale = 1.4826 * _middle(deviations, counts)  # the standard deviation of normally distributed values
    if (level := np.flatnonzero(scale == 0)).size:
        # More than half of the values are equal. Quartiles are rounded inward: interpolated ones would
        # include part of the extreme value of [1, 1, 100].
        chosen, last = ordered[level], counts[level] - 1
        places = (0.25 * last, 0.75 * last, 0.0 * last, 1.0 * last)
        lower, upper = np.ceil(places[0]), np.floor(places[1])
        low, high, least, most = (_taken(chosen, each) for each in (lower, upper, *places[2:]))
        scale[level] = np.where(high > low, (high - low) / 1.349, (most - least) / 10)
    return center, scale


def _middle(ordered: _Floats, counts: npt.NDArray[np.int64]) -> _Floats:
    """Return the median of each row, whose first ``counts`` values are numbers in ascending order."""
    return (_taken(ordered, (counts - 1) // 2) + _taken(ordered, counts // 2)) / 2


def _taken(rows: _Floats, places: npt.NDArray[Any]) -> _Floats:
    import numpy as np

    taken: _Floats = rows[np.arange(len(rows)), places.astype(np.int64)]
    return taken


def _evidence(values: Sequence[_Value]) -> Sequence[_Value]:
    if not values:
        raise ValueError("consensus needs the evidence of at least one peer, got none")
    return values if isinstance(values, Unanimous) else tuple(values)


def _verdict(evidence: Sequence[Hashable], marks: Sequence[bool]) -> Verdict:
    outliers = tuple(position for position, marked in enumerate(marks) if marked)
    return Verdict(Status.ATTRIBUTED if outliers else Status.AGREE, outliers, evidence)
