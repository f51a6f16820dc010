"""The fold: all bytes of a tensor as one 64-bit number that every flipped bit changes (paper, section 5.2).

This module defines it and implements it in torch operations for any device; ``fold_triton`` computes it in
one pass over CUDA memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "EXPONENTS",
    "MULTIPLIER",
    "SALT",
    "avalanche",
    "avalanche_of_all",
    "dense",
    "fold_with_torch",
    "memory_of",
    "not_finite_with_torch",
    "signed",
]

# [Note: every single-bit flip changes the fold]
#
# The bytes, in row-major order, are little-endian 64-bit words w[0], w[1], ...; the last one is padded with
# zeros. With all arithmetic modulo 2**64,
#
#     fold      = avalanche(w[0] + 1 * SALT) + avalanche(w[1] + 2 * SALT) + ...
#     signature = avalanche(fold + tag)        tag = xxh3(algorithm, dtype, shape, length in bytes)
#
# A flipped bit changes one word. Adding a constant is a bijection; so is x ^= x >> 32 with a logical shift
# (the upper half stays and restores the lower), and so is multiplying by an odd number (it has an inverse).
# Hence the term of that word changes, the other terms do not, one changed term always changes a sum, and for
# a fixed tag the last line is a bijection again.
#
# What would break it: an even multiplier drops high bits, which are signs and exponents. int64 >> is
# arithmetic in torch and in Triton, and x ^ (x >> 32) is then the same for x and for its complement; so the
# torch version xors the 32-bit halves, and the kernel computes in uint64. A term that is linear in its word
# changes by exactly 2**63 when the top bit of the word flips: two such changes cancel, and x collides with
# -x. Hence shifts *between* multiplications.
#
# Changes of several words can cancel with probability 2**-64. Words are combined by a wrapping sum only,
# which does not depend on order, so that tiling, block size, launch configuration and the order of atomic
# additions do not affect the result.
#
# SALT is 2**64 / golden ratio (Knuth): its multiples lie far apart. MULTIPLIER is the public "degski64"
# constant, found for this mixer. Shifts by 32 are cheap on a GPU, where a word is two registers and only one
# of them changes.
SALT = 0x9E37_79B9_7F4A_7C15
MULTIPLIER = 0xD6E8_FEB8_6659_FD93

EXPONENTS = {
    torch.float16: 0x7C00_7C00_7C00_7C00,
    torch.bfloat16: 0x7F80_7F80_7F80_7F80,
    torch.float32: 0x7F80_0000_7F80_0000,
    torch.float64: 0x7FF0_0000_0000_0000,
}
"""The exponents of all elements of a word. All ones are NaN or infinity, which is asked of these dtypes."""

_WORD = 8
_MASK = (1 << 64) - 1
_CHUNK = 1 << 18  # words the torch version holds at a time, in buffers of 2 MiB


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds the same bytes row-major, if possible the tensor itself."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    tensor = tensor.detach()
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)  # a strided copy of booleans turns every byte into 0 or 1
    return tensor.resolve_conj().resolve_neg().contiguous()


def memory_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, row-major."""
    return dense(tensor).detach().view(-1).view(torch.uint8)


def fold_with_torch(tensor: Tensor) -> Tensor:
    """Return the fold as a zero-dimensional tensor on the same device."""
    data = memory_of(tensor)
    size = data.numel()
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    count = min(-(-size // _WORD), _CHUNK)
    salts = torch.arange(1, count + 1, dtype=torch.int64, device=data.device) * signed(SALT)
    for first in range(0, size, _CHUNK * _WORD):
        piece = data[first : first + _CHUNK * _WORD]
        words = torch.zeros(-(-len(piece) // _WORD), dtype=torch.int64, device=data.device)
        words.view(torch.uint8)[: len(piece)] = piece  # aligns and pads
        words += salts[: len(words)]
        words += signed(first // _WORD * SALT)
        total += _avalanche_in_place(words).sum()
    return total


def not_finite_with_torch(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1 for each tensor with NaN or infinity, else 0, on the device of the tensors."""
    flags = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    asked = [place for place, each in enumerate(tensors) if each.dtype in EXPONENTS and each.numel()]
    if asked:
        ends = [end for place in asked for end in _ends(tensors[place].detach())]
        flags[asked] = (~torch.stack(ends).isfinite()).view(-1, 2).any(1).to(torch.int64)
    return flags


def _ends(tensor: Tensor) -> Sequence[Tensor]:
    """Return the smallest and the largest element: NaN if there is any."""
    if tensor.numel() == 1:  # an optimizer has a number of steps for each parameter
        return [tensor.reshape(())] * 2
    return torch.aminmax(tensor)


def avalanche(word: int) -> int:
    word &= _MASK
    word ^= word >> 32
    word = word * MULTIPLIER & _MASK
    word ^= word >> 32
    word = word * MULTIPLIER & _MASK
    return word ^ word >> 32


def avalanche_of_all(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the avalanche of each word."""
    half, factor = np.uint64(32), np.uint64(MULTIPLIER)
    words = (words ^ words >> half) * factor
    words = (words ^ words >> half) * factor
    mixed: NDArray[np.uint64] = words ^ words >> half
    return mixed


def _avalanche_in_place(words: Tensor) -> Tensor:
    lower, upper = words.view(torch.int32).view(-1, 2).unbind(1)
    lower ^= upper
    words *= signed(MULTIPLIER)
    lower ^= upper
    words *= signed(MULTIPLIER)
    lower ^= upper
    return words


def signed(word: int) -> int:
    """Return the residue of ``word`` modulo 2**64 that fits torch.int64."""
    return (word + (1 << 63) & _MASK) - (1 << 63)
