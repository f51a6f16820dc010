"""Computes 64-bit signatures of tensors on their own device (paper, section 5.2).

Peers exchange signatures instead of tensors: equal dtype, shape and bytes give equal signatures in every run,
on every device and with every launch configuration, and any single flipped bit changes them. They do not
protect against deliberate collisions. Tensors are only read; those that are not contiguous are copied.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import struct
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
import xxhash

from torchscout.c3.fold import avalanche, fold_with_torch, memory_of, signed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

__all__ = ["Algorithm", "PendingSignatures", "digest", "read_signatures", "signature", "signatures"]


class Algorithm(str, Enum):
    """The hash of a tensor's bytes; peers must use the same one."""

    XXH3 = "xxh3"
    """The fastest one, for host memory only. It misses a change with probability 2**-64."""
    FOLD = "fold"
    """For every device, at memory bandwidth on CUDA; it detects every single-bit flip."""


def signature(tensor: Tensor, *, algorithm: Algorithm | str | None = None) -> int:
    """Return the signature of one tensor, as a signed 64-bit integer.

    For a DTensor it is that of the local shard. By default host tensors use xxh3 and all others fold; pass
    FOLD if peers hold the tensor on different kinds of device. The tensor is read on the current stream of
    its device. Raises ``ValueError`` for a tensor without plain memory.
    """
    tensor = _plain(tensor)
    used = _algorithm_for(tensor, algorithm)
    if used is Algorithm.XXH3:
        return _finished(_xxh3(tensor), _tag(tensor, used))
    fold = _fold((tensor,))
    tag = _tag(tensor, used)  # while the device folds
    return _finished(int(fold.item()), tag)


def signatures(tensors: Iterable[Tensor], *, algorithm: Algorithm | str | None = None) -> list[int]:
    """Return the signature of each tensor, with one small transfer per device for all of them."""
    return PendingSignatures(tensors, algorithm=algorithm).read()


class PendingSignatures:
    """Signatures that are being computed on the devices of the tensors.

    The tensors may be changed or freed on the same stream as soon as this object exists.
    """

    def __init__(self, tensors: Iterable[Tensor], *, algorithm: Algorithm | str | None = None) -> None:
        work = [(tensor, _algorithm_for(tensor, algorithm)) for tensor in map(_plain, tensors)]
        groups: dict[torch.device, list[Tensor]] = {}
        for tensor, used in work:
            if used is Algorithm.FOLD:
                groups.setdefault(tensor.device, []).append(tensor)
        self.folds = {device: _fold(group) for device, group in groups.items()}
        """Device -> the folds that are computed there."""
        # Computed while the devices fold.
        self._tags = [_tag(tensor, used) for tensor, used in work]
        self._digests: list[int | torch.device] = [
            tensor.device if used is Algorithm.FOLD else _xxh3(tensor) for tensor, used in work
        ]

    def read(self) -> list[int]:
        """Wait for the devices and return the signatures."""
        return read_signatures([self])[0]

    def finished(self, folded: Mapping[torch.device, Iterator[int]]) -> list[int]:
        """Return the signatures, given the values of ``folds``."""
        digests = [next(folded[each]) if isinstance(each, torch.device) else each for each in self._digests]
        return [_finished(digest, tag) for digest, tag in zip(digests, self._tags, strict=True)]


def read_signatures(pending: Sequence[PendingSignatures]) -> list[list[int]]:
    """Read several pending signatures with one small transfer per device."""
    groups: dict[torch.device, list[Tensor]] = {}
    for each in pending:
        for device, fold in each.folds.items():
            groups.setdefault(device, []).append(fold)
    folded = {
        device: iter((folds[0] if len(folds) == 1 else torch.cat(folds)).tolist())
        for device, folds in groups.items()
    }
    return [each.finished(folded) for each in pending]


def _plain(tensor: Tensor) -> Tensor:
    """Return the strided tensor whose memory is read; raises ``ValueError`` if there is none."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        tensor = _unwrapped(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise ValueError(
            f"a signature needs a strided tensor of plain numbers, got {_described(tensor)}; "
            "take the signatures of its parts, such as indices and values"
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
    """Return the memory of a tensor subclass."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"a signature needs a tensor, got {type(tensor).__name__}")
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        from torchscout.utils._torch import AsyncCollectiveTensor

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


def _xxh3(tensor: Tensor) -> int:
    data = memory_of(tensor)
    # Not a NumPy array: it would forbid to resize the storage, which is how FSDP frees its storages.
    memory = (ctypes.c_ubyte * data.numel()).from_address(data.data_ptr()) if data.numel() else b""
    return xxhash.xxh3_64_intdigest(memory)


def _fold(tensors: Sequence[Tensor]) -> Tensor:
    """Return the folds of tensors on one device, on that device."""
    if tensors[0].is_cuda and (fused := _fused_fold()) is not None:
        return fused(tensors)
    return torch.stack([fold_with_torch(tensor) for tensor in tensors])


@functools.cache
def _fused_fold() -> Callable[[Sequence[Tensor]], Tensor] | None:
    """Return the Triton version; None if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from torchscout.c3.fold_triton import fold_with_triton

    return fold_with_triton


def _tag(tensor: Tensor, algorithm: Algorithm) -> int:
    return _tag_of(algorithm, tensor.dtype, tensor.shape, tensor.nbytes)


@functools.lru_cache(maxsize=4096)
def _tag_of(algorithm: Algorithm, dtype: torch.dtype, shape: torch.Size, size: int) -> int:
    text = f"{algorithm.value} {dtype} {tuple(shape)} {size}"
    return xxhash.xxh3_64_intdigest(text.encode())


def _finished(digest: int, tag: int) -> int:
    return signed(avalanche(digest + tag))


def digest(signatures: Sequence[int]) -> int:
    """Combine signatures, in order, into one signed 64-bit integer."""
    return signed(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(signatures)}q", *signatures)))
