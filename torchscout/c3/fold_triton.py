"""The fold as one pass over CUDA memory (paper, section 5.2).

Imported on first use, because Triton is optional. ``fold`` defines the fold: see [Note: every single-bit flip
changes the fold].
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import driver

from torchscout.c3.fold import EXPONENTS, MULTIPLIER, SALT, dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["LAUNCH", "FoldKernel", "Launch", "chunks_of", "fold_with_triton"]


class Launch(NamedTuple):
    """The launch configuration, which affects only the speed."""

    block: int
    """Words that one program reads at a time, a power of two."""
    warps: int
    """Warps of one program."""
    programs: int
    """The largest number of programs for each multiprocessor, which share the blocks."""


LAUNCH = Launch(block=2048, warps=4, programs=16)  # the best of a sweep on an H200
CHUNK = 1 << 18
"""Bytes that one program folds if many tensors share a launch; a multiple of any block."""
_FEW = 4
"""For this many tensors one launch with a table is faster than one launch for each."""
_ENTRY_BYTES = 5 * 8
"""Of one chunk in a table."""


# [Note: the scratch cleans itself]
#
# Programs add their folds to a word in device memory, which must be zero when the kernel starts. Allocating
# and clearing one for every call would take longer than folding 16 MiB. So each stream, whose kernels run one
# after another, has one word and a counter of finished programs: the last program takes the total, and leaves
# both at zero for the next kernel.
#
# [Note: one launch for many tensors]
#
# A launch takes the host about as long as the device takes for 16 MiB, and a model with its optimizer has
# thousands of smaller tensors. So tensors are divided into chunks, a table contains where each chunk is, and
# one launch folds all of them: every program adds its part to the fold of its tensor. Tensors of another
# alignment need a launch of their own. The table depends only on addresses, sizes and dtypes, which are the
# same in every check, so that the last ones are cached.
#
# [Note: NaN and infinity are found on the way]
#
# An element is NaN or infinity if all bits of its exponent are ones. A word has up to four elements. Adding 1
# to each of their exponents, with all other bits cleared, carries into the place of the sign exactly there,
# and never into the next element:
#
#     bfloat16    0111 1111 1000 0000    the exponent of infinity, and its mask
#               + 0000 0000 1000 0000    the unit
#               = 1000 0000 0000 0000    the carry
#
# Three operations a word on what was read anyway: and, add, or. The padding of the last word has exponents of
# zeros. The words of a block are joined before they are kept, because a second register for each word of a
# thread would leave room for fewer programs on a multiprocessor.


def fold_with_triton(tensors: Sequence[Tensor], launch: Launch = LAUNCH, *, finite: bool = False) -> Tensor:
    """Return the folds of tensors on one CUDA device, on that device; allocates 8 bytes for each.

    With ``finite`` as many flags follow: 1 for a tensor with NaN or infinity, else 0.
    """
    device = tensors[0].device
    if device.index != torch.cuda.current_device():  # asking is cheaper than switching
        with torch.cuda.device(device):
            return fold_with_triton(tensors, launch, finite=finite)
    every = [dense(tensor) for tensor in tensors]
    kernel = _kernel_for(device.index, launch)
    stream = driver.active.get_current_stream(device.index)
    if finite or len(every) >= _FEW:
        places = tuple((data.data_ptr(), data.nbytes, EXPONENTS.get(data.dtype, 0)) for data in every)
        folds = torch.zeros(len(every) << finite, dtype=torch.int64, device=device)
        flags = folds.data_ptr() + 8 * len(every) if finite else 0
        table, groups = _table_for(device.index, stream, places)
        kernel.fold_chunks(folds.data_ptr(), flags, table.data_ptr(), groups)
        return folds
    folds = torch.empty(len(every), dtype=torch.int64, device=device)
    result = folds.data_ptr()
    scratch = _scratch_for(device.index, stream).data_ptr()
    for data in every:
        kernel.fold(result, scratch, data.data_ptr(), data.nbytes)
        result += 8
    return folds


def chunks_of(
    places: Sequence[tuple[int, int, int]], chunk: int = CHUNK
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return a table of chunks, and the alignment and number of the chunks in each part of it.

    ``places`` are the address, the size in bytes and the mask of exponents of each tensor. An entry has the
    address, the size, the index of the first word, the index of the tensor, and the mask. An empty tensor
    has no chunk: its fold is zero.
    """
    addresses, sizes, masks = (np.array(column, dtype=np.int64) for column in zip(*places, strict=True))
    counts = -(-sizes // chunk)
    tensor = np.repeat(np.arange(len(places)), counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = number * chunk
    size = np.minimum(sizes[tensor] - first, chunk)
    table = np.stack([addresses[tensor] + first, size, first // 8, tensor, masks[tensor]], axis=1)
    alignments = np.gcd(table[:, 0], 16)
    groups = zip(*(each.tolist() for each in np.unique(alignments, return_counts=True)), strict=True)
    return torch.from_numpy(table[np.argsort(alignments, kind="stable")]), [*groups]


@functools.lru_cache(maxsize=16)
def _table_for(
    device: int,
    stream: int,  # noqa: ARG001  each stream fills a table of its own
    places: tuple[tuple[int, int, int], ...],
) -> tuple[Tensor, list[tuple[int, int]]]:
    """See [Note: one launch for many tensors]."""
    table, groups = chunks_of(places)
    return table.pin_memory().to(f"cuda:{device}", non_blocking=True), groups


@functools.cache
def _kernel_for(device: int, launch: Launch) -> FoldKernel:
    return FoldKernel(launch, torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _scratch_for(device: int, stream: int) -> Tensor:  # noqa: ARG001  one for each stream
    """See [Note: the scratch cleans itself]."""
    return torch.zeros(2, dtype=torch.int64, device=f"cuda:{device}")


class FoldKernel:
    """The compiled kernel of one device, which must be the current device in every call.

    It takes addresses instead of tensors: one kernel then serves every dtype and size, and a launch skips
    Triton's own dispatch, which inspects all arguments and takes longer than folding 16 MiB.
    """

    def __init__(self, launch: Launch, processors: int) -> None:
        self._launch = launch
        self._most_programs = launch.programs * processors
        self._compiled: dict[tuple[Any, ...], Any] = {}
        """By constants; the two kernels have different ones."""

    def fold(self, result: int, scratch: int, address: int, size: int) -> None:
        """Write the fold of ``size`` bytes at ``address`` to ``result``; ``scratch`` points to two zero
        words."""
        block = self._launch.block
        programs = min(size // (8 * block) + 1, self._most_programs)
        constants = math.gcd(address, 16), block  # an empty tensor may have no address
        kernel = self._compile(_fold_kernel, 4, constants)
        kernel[programs, 1, 1](result, scratch, address, size, *constants)

    def fold_chunks(self, folds: int, flags: int, table: int, groups: Sequence[tuple[int, int]]) -> None:
        """Add the folds of the chunks in a table (``chunks_of``) to the words at ``folds``, and set a word at
        ``flags`` to 1 where a tensor is not finite; without ``flags`` only fold."""
        for alignment, chunks in groups:
            constants = bool(flags), alignment, self._launch.block
            kernel = self._compile(_chunks_kernel, 3, constants)
            kernel[chunks, 1, 1](folds, flags, table, *constants)
            table += chunks * _ENTRY_BYTES

    def _compile(self, kernel: Any, arguments: int, constants: tuple[int, ...]) -> Any:
        if constants not in self._compiled:
            if isinstance(kernel, triton.JITFunction):  # otherwise Triton interprets it
                wide = [1 << 40] * arguments  # any value that does not fit 32 bits
                kernel = kernel.warmup(*wide, *constants, num_warps=self._launch.warps, grid=(1,))
            self._compiled[constants] = kernel
        return self._compiled[constants]


_SALT = tl.constexpr(SALT)
_MULTIPLIER = tl.constexpr(MULTIPLIER)


# The kernel is not specialized on values: it is compiled once and launched with any address and size.
@triton.jit(do_not_specialize=["result", "scratch", "address", "size"])  # type: ignore[untyped-decorator]
def _fold_kernel(
    result: tl.int64,
    scratch: tl.int64,
    address: tl.int64,
    size: tl.int64,
    alignment: tl.constexpr,
    block: tl.constexpr,
) -> None:
    size = size.to(tl.int64)
    words, blocks = size // 8, size // (8 * block)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    lane = tl.arange(0, block)
    salt = (lane + 1).to(tl.uint64) * _SALT
    folded = tl.zeros([block], tl.uint64)
    for number in range(program, blocks, programs):
        first = number * block
        word = _load_words(address + first * 8, lane, None, alignment)
        folded += _avalanche(word + (salt + first.to(tl.uint64) * _SALT))
    if program == blocks % programs:  # the program of the last, partial block
        first = blocks * block
        index = first + lane
        word = _load_words(address + first * 8, lane, index < words, alignment)
        word = tl.where(index < words, word, _load_tail(address + words * 8, size - words * 8))
        last = _avalanche(word + (salt + first.to(tl.uint64) * _SALT))
        folded += tl.where(index * 8 < size, last, 0)
    total = scratch.to(tl.pointer_type(tl.uint64))
    finished = total + 1
    tl.atomic_add(total, tl.sum(folded), sem="relaxed")
    if tl.atomic_add(finished, 1, sem="acq_rel") == (programs - 1).to(tl.uint64):  # the last one
        tl.store(result.to(tl.pointer_type(tl.uint64)), tl.atomic_xchg(total, 0, sem="relaxed"))
        tl.atomic_xchg(finished, 0, sem="relaxed")


@triton.jit(do_not_specialize=["folds", "flags", "table"])  # type: ignore[untyped-decorator]
def _chunks_kernel(
    folds: tl.int64,
    flags: tl.int64,
    table: tl.int64,
    has_flags: tl.constexpr,
    alignment: tl.constexpr,
    block: tl.constexpr,
) -> None:
    entry = table.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * 5
    address, size, start, place = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    words, blocks = size // 8, size // (8 * block)
    lane = tl.arange(0, block)
    salt = (lane + 1).to(tl.uint64) * _SALT
    folded = tl.zeros([block], tl.uint64)
    mask = tl.load(entry + 4).to(tl.uint64)
    unit = mask & ~(mask << 1)  # the lowest bit of each exponent
    joins: tl.constexpr = block // 256 if block > 256 else 1
    sums = tl.zeros([block // joins], tl.uint64)
    for number in range(blocks):
        first = number * block
        word = _load_words(address + first * 8, lane, None, alignment)
        folded += _avalanche(word + (salt + (start + first).to(tl.uint64) * _SALT))
        if has_flags:
            sums |= _joined((word & mask) + unit, joins)
    if blocks * block * 8 < size:  # only in the last chunk of a tensor
        first = blocks * block
        index = first + lane
        word = _load_words(address + first * 8, lane, index < words, alignment)
        word = tl.where(index < words, word, _load_tail(address + words * 8, size - words * 8))
        last = _avalanche(word + (salt + (start + first).to(tl.uint64) * _SALT))
        folded += tl.where(index * 8 < size, last, 0)
        if has_flags:
            sums |= _joined((word & mask) + unit, joins)
    tl.atomic_add(folds.to(tl.pointer_type(tl.uint64)) + place, tl.sum(folded), sem="relaxed")
    if has_flags:
        carry = mask + unit
        if (tl.reduce(sums, 0, _either) & carry) != 0:  # other programs may write the same value
            tl.store(flags.to(tl.pointer_type(tl.int64)) + place, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _joined(words: tl.tensor, joins: tl.constexpr) -> tl.tensor:
    """Return ``words`` with each ``joins`` of them, which one thread has, in one."""
    if joins == 1:
        return words
    return tl.reduce(tl.reshape(words, [joins, words.shape[0] // joins]), 0, _either)


@triton.jit  # type: ignore[untyped-decorator]
def _either(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    return one | other


@triton.jit  # type: ignore[untyped-decorator]
def _avalanche(word: tl.tensor) -> tl.tensor:
    word ^= word >> 32
    word *= _MULTIPLIER
    word ^= word >> 32
    word *= _MULTIPLIER
    return word ^ (word >> 32)


@triton.jit  # type: ignore[untyped-decorator]
def _load_words(
    address: tl.tensor, lane: tl.tensor, mask: tl.tensor | None, alignment: tl.constexpr
) -> tl.tensor:
    """Return the 64-bit words from ``address`` on, read in the widest pieces that its alignment allows."""
    if alignment >= 8:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), alignment)
        return tl.load(pointer + lane, mask=mask)
    pieces: tl.constexpr = 8 // alignment
    kind: tl.constexpr = tl.uint32 if alignment == 4 else (tl.uint16 if alignment == 2 else tl.uint8)
    pointer = address.to(tl.pointer_type(kind)) + lane * pieces
    word = tl.load(pointer, mask=mask).to(tl.uint64)
    for piece in tl.static_range(1, pieces):
        word |= tl.load(pointer + piece, mask=mask).to(tl.uint64) << (64 // pieces * piece)
    return word


@triton.jit  # type: ignore[untyped-decorator]
def _load_tail(address: tl.tensor, size: tl.tensor) -> tl.tensor:
    """Return the last ``size`` bytes, fewer than 8, as one word padded with zeros."""
    place = tl.arange(0, 8)
    byte = tl.load(address.to(tl.pointer_type(tl.uint8)) + place, mask=place < size, other=0)
    return tl.sum(byte.to(tl.uint64) << (8 * place).to(tl.uint64))
