"""Sets of numbers and their sums, as bits of an integer: bit n stands for n. Knows nothing of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

__all__ = ["chosen", "numbers", "set_of", "sums"]


def set_of(members: Iterable[int]) -> int:
    found = 0
    for number in members:
        found |= 1 << number
    return found


def numbers(bits: int) -> Iterator[int]:
    """Smallest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def sums(left: int, right: int) -> int:
    """Every number that is one of ``left`` plus one of ``right``."""
    found = 0
    for start, length in _runs(right):
        found |= _smeared(left, length) << start
    return found


def chosen(total: int, sets: Sequence[int]) -> list[int]:
    """One member of each set, together ``total``; there must be such a choice."""
    reached = [1]
    for bits in sets:
        reached.append(sums(reached[-1], bits))
    picked = []
    for before, bits in zip(reached[-2::-1], reversed(sets), strict=True):
        number = next(each for each in numbers(bits) if each <= total and before >> (total - each) & 1)
        picked.append(number)
        total -= number
    assert not total, f"{total} is left"
    return picked[::-1]


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """The stretches of consecutive members, each with its start and length."""
    start = 0
    while bits:
        zeros = (bits & -bits).bit_length() - 1
        bits >>= zeros
        ones = (~bits & (bits + 1)).bit_length() - 1
        yield start + zeros, ones
        bits >>= ones
        start += zeros + ones


def _smeared(bits: int, length: int) -> int:
    """Shifted by 0, 1 and so on up to ``length - 1``, all together."""
    done = 1
    while done < length:
        shift = min(done, length - done)
        bits |= bits << shift
        done += shift
    return bits
