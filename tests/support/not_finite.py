"""Tensors with and without NaN and infinity, for every way to look for them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

FIELDS = {
    torch.float16: (5, 10, torch.int16),
    torch.bfloat16: (8, 7, torch.int16),
    torch.float32: (8, 23, torch.int32),
    torch.float64: (11, 52, torch.int64),
}
"""Bits of the exponent and of the mantissa, and the integer of the same size."""
SIZES = [1, 3, 67]
"""Elements, which end in a part of a word if they have fewer than 64 bits."""


def patterns(dtype: torch.dtype) -> tuple[list[int], list[int]]:
    """Return the bits of elements that are not finite, and of some that are."""
    exponent, mantissa, _ = FIELDS[dtype]
    infinity, ones = (1 << exponent) - 1 << mantissa, (1 << mantissa) - 1
    payloads = [1, 1 << mantissa - 1, ones]
    largest = infinity - (1 << mantissa) | ones
    wrong = [infinity, *(infinity | each for each in payloads)]
    right = [0, 1, ones, 1 << mantissa, 1 << exponent + mantissa - 1, largest]  # two of them are subnormal
    sign = 1 << exponent + mantissa
    return [*wrong, *(sign | each for each in wrong)], [*right, *(sign | each for each in right)]


def tensor_of(words: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return elements of these bits."""
    integer = FIELDS[dtype][2]
    half = 1 << 8 * dtype.itemsize - 1
    return torch.tensor([(each + half) % (2 * half) - half for each in words], dtype=integer).view(dtype)


def cases() -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield names, tensors in host memory, and whether they hold NaN or infinity."""
    for dtype in FIELDS:
        wrong, right = patterns(dtype)
        for size in SIZES:
            mixed = (right * size)[-size:]
            yield f"{dtype}, {size} finite", tensor_of(mixed, dtype), False
            for place in sorted({0, size // 2, size - 1}):
                for bits in wrong:
                    words = [*mixed[:place], bits, *mixed[place + 1 :]]
                    yield f"{dtype}, {bits:x} at {place} of {size}", tensor_of(words, dtype), True
        for bits in right:
            yield f"{dtype}, {bits:x} only", tensor_of([bits] * 9, dtype), False
        hole = tensor_of([*right, wrong[0], *right], dtype)
        for start in range(1, 9):
            yield f"{dtype}, unaligned by {start}", hole[start:], True
        yield f"{dtype}, after what is infinite", hole[len(right) + 1 :], False
        yield f"{dtype}, every second element", hole[1::2], False
        yield f"{dtype}, transposed", hole[1:].view(4, 6).t(), True
        yield f"{dtype}, expanded", hole[len(right)].expand(3, 2), True
        yield f"{dtype}, one number", hole[len(right)], True
        yield f"{dtype}, parameter", torch.nn.Parameter(hole), True
        yield f"{dtype}, empty", tensor_of([], dtype), False
    ones = torch.full((67,), 255, dtype=torch.uint8)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e5m2, torch.complex64):
        yield f"{dtype}, all bits set", ones[: 67 // dtype.itemsize * dtype.itemsize].view(dtype), False
    yield "booleans", torch.ones(67, dtype=torch.bool), False


def random_tensor(generator: torch.Generator, most: int) -> torch.Tensor:
    """Return up to ``most`` elements of any bits; in about half of all tensors some are not finite."""

    def number(limit: int) -> int:
        return int(torch.randint(0, limit, (), generator=generator))

    dtype = [*FIELDS][number(len(FIELDS))]
    exponent, mantissa, integer = FIELDS[dtype]
    data = torch.randint(0, 256, (number(most) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    bits = data.view(integer)
    if number(2):  # no exponent is all ones
        bits &= ~(1 << mantissa + number(exponent))
    return bits.view(dtype)
