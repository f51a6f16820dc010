"""A tensor, or several, as one 64-bit integer, computed where the tensor lives (paper, section 5.2).

Peers exchange these signatures instead of tensors: equal dtype, shape and bytes give equal signatures on
every run, device and launch configuration, and any single flipped bit changes them. They are no defence
against somebody who constructs collisions. ``digest`` is for tensors that are compared as one, such as all
inputs of a replay. This module only reads tensors, and copies those that are not contiguous.
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

from torchscout.decision.fold import avalanche, fold_with_torch, memory_of, signed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

__all__ = ["Algorithm", "PendingSignatures", "digest", "read_signatures", "signature", "signatures"]


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
    return PendingSignatures(tensors, algorithm=algorithm).read()


class PendingSignatures:
    """What ``signatures`` gives, begun on the tensors' devices and not waited for.

    The tensors may be changed or freed as soon as this is made, on the same stream.
    """

    def __init__(self, tensors: Iterable[Tensor], *, algorithm: Algorithm | str | None = None) -> None:
        work = [(tensor, _algorithm_for(tensor, algorithm)) for tensor in map(_plain, tensors)]
        groups: dict[torch.device, list[Tensor]] = {}
        for tensor, used in work:
            if used is Algorithm.FOLD:
                groups.setdefault(tensor.device, []).append(tensor)
        self.folds = {device: _fold(group) for device, group in groups.items()}
        """By device, those that are computed there."""
        # While the devices fold.
        self._tags = [_tag(tensor, used) for tensor, used in work]
        self._digests: list[int | torch.device] = [
            tensor.device if used is Algorithm.FOLD else _xxh3(tensor) for tensor, used in work
        ]

    def read(self) -> list[int]:
        """The signatures, once the devices are done with them."""
        return read_signatures([self])[0]

    def finished(self, folded: Mapping[torch.device, Iterator[int]]) -> list[int]:
        """The signatures, given the values of ``folds``."""
        digests = [next(folded[each]) if isinstance(each, torch.device) else each for each in self._digests]
        return [_finished(digest, tag) for digest, tag in zip(digests, self._tags, strict=True)]


def read_signatures(pending: Sequence[PendingSignatures]) -> list[list[int]]:
    """Those of each, with one small transfer per device for all of them."""
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
    # Not as an array of NumPy's: that forbids the storage ever to be resized, and FSDP frees its own so.
    memory = (ctypes.c_ubyte * data.numel()).from_address(data.data_ptr()) if data.numel() else b""
    return xxhash.xxh3_64_intdigest(memory)


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
    from torchscout.decision.fold_triton import fold_with_triton

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
    """A signed 64-bit integer for tensors with these signatures; which tensor comes first matters."""
    return signed(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(signatures)}q", *signatures)))
