"""A tensor as one 64-bit integer, computed where the tensor lives (paper, section 5.2).

Peers exchange these signatures instead of tensors: equal dtype, shape and bytes give equal
signatures on every run, device and launch configuration, and any single flipped bit changes
them. They are no defence against somebody who constructs collisions. Comparing them is for
``consensus``; this module only reads tensors, and copies those that are not contiguous.
"""

from __future__ import annotations

import functools
import importlib.util
from enum import Enum
from typing import TYPE_CHECKING

import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

__all__ = ["Algorithm", "signature", "signatures"]

# [Note: every single-bit flip changes the fold]
#
# The bytes, in row-major order, are little-endian 64-bit words w[0], w[1], ...; the last one is
# padded with zeros. With all arithmetic modulo 2**64,
#
#     fold      = avalanche(w[0] + 1 * SALT) + avalanche(w[1] + 2 * SALT) + ...
#     signature = avalanche(fold + tag)        tag = xxh3(algorithm, dtype, shape, length in bytes)
#
# A flipped bit changes one word. Adding a constant is a bijection; so is x ^= x >> 32 with a
# logical shift (the upper half stays and undoes the lower), and so is multiplying by an odd
# number (it has an inverse). Hence that word's term changes, the other terms do not, one changed
# term always changes a sum, and for a fixed tag the last line is a bijection again.
#
# What would break it: an even multiplier drops high bits, which are signs and exponents. int64 >>
# is arithmetic in torch and in Triton, and x ^ (x >> 32) is then the same for x and for its
# complement; so the torch version xors the 32-bit halves, and the kernel computes in uint64. And
# a term that is linear in its word changes by exactly 2**63 when the word's top bit flips, whatever
# the word: two such changes cancel, and x collides with -x. Hence shifts *between* multiplications.
#
# Changes of several words can cancel, by a chance of 2**-64. One wrapping sum is all that combines
# words: it does not depend on order, so tiling, block size, launch configuration and the order of
# atomic additions have no influence on the result.
#
# SALT is 2**64 / golden ratio (Knuth): its multiples lie far apart. MULTIPLIER is the public
# "degski64" constant, found for just this mixer. Shifts by 32 are cheap on a GPU, where a word is
# two registers and only one of them changes.
SALT = 0x9E37_79B9_7F4A_7C15
MULTIPLIER = 0xD6E8_FEB8_6659_FD93

_WORD = 8
_MASK = (1 << 64) - 1
_CHUNK = 1 << 18  # words the torch version holds at a time, in buffers of 2 MiB


class Algorithm(str, Enum):
    """How bytes become 64 bits; peers must use the same one."""

    XXH3 = "xxh3"
    """The fastest for host memory, and for nothing else. Chance of a missed change: 2**-64."""
    FOLD = "fold"
    """The same on every device, at memory bandwidth on CUDA; sees every single-bit flip."""


def signature(tensor: Tensor, *, algorithm: Algorithm | str | None = None) -> int:
    """The signature of one tensor, as a signed 64-bit integer.

    A DTensor stands for its local shard. By default host tensors use xxh3 and all others fold;
    name FOLD where peers hold a tensor on different kinds of device. The tensor is read on
    the current stream of its device.
    """
    tensor = _plain(tensor)
    used = _algorithm_for(tensor, algorithm)
    if used is Algorithm.XXH3:
        return _finished(_xxh3(tensor), _tag(tensor, used))
    fold = _fold((tensor,))
    tag = _tag(tensor, used)  # while the device folds
    return _finished(int(fold.item()), tag)


def signatures(tensors: Iterable[Tensor], *, algorithm: Algorithm | str | None = None) -> list[int]:
    """What ``signature`` gives for each, with one small transfer per device for all of them."""
    work = [(tensor, _algorithm_for(tensor, algorithm)) for tensor in map(_plain, tensors)]
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor, used in work:
        if used is Algorithm.FOLD:
            groups.setdefault(tensor.device, []).append(tensor)
    folds = {device: _fold(group) for device, group in groups.items()}
    tags = [_tag(tensor, used) for tensor, used in work]  # while the devices fold
    folded = {device: iter(fold.tolist()) for device, fold in folds.items()}
    digests = [
        next(folded[tensor.device]) if used is Algorithm.FOLD else _xxh3(tensor) for tensor, used in work
    ]
    return [_finished(digest, tag) for digest, tag in zip(digests, tags, strict=True)]


def dense(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds the same bytes row-major, the tensor itself where it does already."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    tensor = tensor.detach()
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)  # a strided copy of booleans turns every byte into 0 or 1
    return tensor.resolve_conj().resolve_neg().contiguous()


def fold_with_torch(tensor: Tensor) -> Tensor:
    """The fold in torch operations, chunk by chunk, as a zero-dimensional tensor on the same device."""
    data = _bytes(tensor)
    size = data.numel()
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    count = min(-(-size // _WORD), _CHUNK)
    salts = torch.arange(1, count + 1, dtype=torch.int64, device=data.device) * _signed(SALT)
    for first in range(0, size, _CHUNK * _WORD):
        piece = data[first : first + _CHUNK * _WORD]
        words = torch.zeros(-(-len(piece) // _WORD), dtype=torch.int64, device=data.device)
        words.view(torch.uint8)[: len(piece)] = piece  # aligns and pads
        words += salts[: len(words)]
        words += _signed(first // _WORD * SALT)
        total += _avalanche_in_place(words).sum()
    return total


def _plain(tensor: Tensor) -> Tensor:
    """The strided tensor whose memory is read, or a ValueError where there is none."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        tensor = _unwrapped(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise ValueError(
            f"a signature needs a strided tensor of plain numbers, got {_described(tensor)}; "
            "take the signatures of the tensors it is made of, such as indices and values"
        )
    if tensor.is_meta:
        raise ValueError(f"a meta tensor has no bytes, got {_described(tensor)}; materialize it first")
    if tensor.untyped_storage().nbytes() == 0 and tensor.numel():
        raise ValueError(
            f"the storage was freed, got {_described(tensor)}; "
            "take the signature of a sharded parameter while it is gathered, or of its shard"
        )
    return tensor


def _unwrapped(tensor: Tensor) -> Tensor:
    """The memory behind a tensor subclass."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"a signature needs a tensor, got {type(tensor).__name__}")
    if torch.distributed.is_available():
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            tensor = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ValueError(
            f"{type(tensor).__name__} keeps its bytes in other tensors; take the signatures of those"
        )
    return tensor.as_subclass(torch.Tensor)


def _described(tensor: Tensor) -> str:
    shape = "ragged shape" if tensor.is_nested else f"shape {tuple(tensor.shape)}"
    return f"{tensor.layout} {tensor.dtype} of {shape} on {tensor.device}"


def _algorithm_for(tensor: Tensor, requested: Algorithm | str | None) -> Algorithm:
    if requested is None:
        return Algorithm.XXH3 if tensor.is_cpu else Algorithm.FOLD
    algorithm = Algorithm(requested)
    if algorithm is Algorithm.XXH3 and not tensor.is_cpu:
        raise ValueError(f"xxh3 reads host memory, got {_described(tensor)}; use fold")
    return algorithm


def _bytes(tensor: Tensor) -> Tensor:
    return dense(tensor).detach().view(-1).view(torch.uint8)


def _xxh3(tensor: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(_bytes(tensor).numpy().data)


def _fold(tensors: Sequence[Tensor]) -> Tensor:
    """The folds of tensors on one device, still on that device."""
    if tensors[0].is_cuda and (fused := _fused_fold()) is not None:
        return fused(tensors)
    return torch.stack([fold_with_torch(tensor) for tensor in tensors])


@functools.cache
def _fused_fold() -> Callable[[Sequence[Tensor]], Tensor] | None:
    """The Triton version; None where Triton is not installed, and torch operations must do."""
    if importlib.util.find_spec("triton") is None:
        return None
    from torchscout.decision.fold_kernel import fold_with_triton

    return fold_with_triton


def _tag(tensor: Tensor, algorithm: Algorithm) -> int:
    text = f"{algorithm.value} {tensor.dtype} {tuple(tensor.shape)} {tensor.nbytes}"
    return xxhash.xxh3_64_intdigest(text.encode())


def _finished(digest: int, tag: int) -> int:
    return _signed(_avalanche(digest + tag))


def _avalanche(word: int) -> int:
    word &= _MASK
    word ^= word >> 32
    word = word * MULTIPLIER & _MASK
    word ^= word >> 32
    word = word * MULTIPLIER & _MASK
    return word ^ word >> 32


def _avalanche_in_place(words: Tensor) -> Tensor:
    lower, upper = words.view(torch.int32).view(-1, 2).unbind(1)
    lower ^= upper
    words *= _signed(MULTIPLIER)
    lower ^= upper
    words *= _signed(MULTIPLIER)
    lower ^= upper
    return words


def _signed(word: int) -> int:
    """The residue of ``word`` modulo 2**64 that fits torch.int64."""
    return (word + (1 << 63) & _MASK) - (1 << 63)
