"""Computes which part of a whole tensor a rank holds, and which elements two parts share (paper, section 9).

Pure functions on shapes and placements as ``state.layout`` describes them; the same splits as DTensor's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torchscout.errors import CheckpointError

__all__ = ["Part", "Shared", "is_covered", "parts_of", "shared", "whole_part"]

_Span = tuple[int, int]
"""First and last element along one dimension, the last one excluded."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a whole tensor, and where it lies in the local tensor that holds it."""

    offsets: tuple[int, ...]
    """In the whole tensor."""
    local: tuple[int, ...]
    """In the local tensor."""
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Shared:
    """The elements that two parts have in common, as slices of their local tensors."""

    source: tuple[slice, ...]
    target: tuple[slice, ...]


def whole_part(shape: Sequence[int]) -> tuple[Part, ...]:
    """The part that is the whole tensor; none if it is empty."""
    zeros = (0,) * len(shape)
    return (Part(zeros, zeros, tuple(shape)),) if math.prod(shape) else ()


def parts_of(whole: dict[str, Any]) -> tuple[Part, ...]:
    """The parts of the rank with this layout; several where strided shards interleave, none if it is empty.

    Raises ``CheckpointError`` for partial sums, which are no part of a tensor.
    """
    spans: list[list[_Span]] = [[(0, size)] if size else [] for size in whole["shape"]]
    for size, place, (kind, *values) in zip(
        whole["mesh"], whole["coordinate"], whole["placements"], strict=True
    ):
        if kind == "partial":
            raise CheckpointError("is a partial sum, which no other layout can hold")
        if kind == "replicate":
            continue
        dim = values[0]
        pieces = _split(spans[dim], values[1] if kind == "strided" else 1)
        spans[dim] = _joined(span for piece in pieces for span in _split(piece, size)[place])
    parts = []
    for block in product(*(_placed(each) for each in spans)):
        offsets, local, sizes = (tuple(column) for column in zip(*block, strict=True)) if block else ((),) * 3
        parts.append(Part(offsets, local, sizes))
    return tuple(parts)


def shared(source: Part, target: Part) -> Shared | None:
    """What two parts of one tensor have in common; None if that is nothing."""
    sources, targets = [], []
    for first, ours, size, second, theirs, length in zip(
        *(source.offsets, source.local, source.sizes, target.offsets, target.local, target.sizes), strict=True
    ):
        start, stop = max(first, second), min(first + size, second + length)
        if start >= stop:
            return None
        sources.append(slice(ours + start - first, ours + stop - first))
        targets.append(slice(theirs + start - second, theirs + stop - second))
    return Shared(tuple(sources), tuple(targets))


def is_covered(shape: Sequence[int], parts: Sequence[Part]) -> bool:
    """Whether these parts, without duplicates, are the whole tensor: ranks' parts never overlap partly."""
    return sum(each.elements for each in parts) == math.prod(shape)


def _split(spans: Sequence[_Span], count: int) -> list[list[_Span]]:
    """Split into ``count`` pieces as ``torch.chunk`` does; the last ones may be smaller, or empty."""
    length = sum(stop - start for start, stop in spans)
    size = -(-length // count)
    return [_between(spans, place * size, min((place + 1) * size, length)) for place in range(count)]


def _between(spans: Sequence[_Span], first: int, last: int) -> list[_Span]:
    """The elements from position ``first`` to ``last`` of these spans laid end to end."""
    found, position = [], 0
    for start, stop in spans:
        low, high = max(first, position), min(last, position + stop - start)
        if low < high:
            found.append((start + low - position, start + high - position))
        position += stop - start
    return found


def _joined(spans: Iterable[_Span]) -> list[_Span]:
    """Adjacent spans as one."""
    found: list[_Span] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _placed(spans: Sequence[_Span]) -> list[tuple[int, int, int]]:
    """Each span's offset in the whole, offset in the local tensor, and length."""
    found, position = [], 0
    for start, stop in spans:
        found.append((start, position, stop - start))
        position += stop - start
    return found
