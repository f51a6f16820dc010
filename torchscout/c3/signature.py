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
from itertools import compress, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from torchscout.c3.fold import (
    avalanche,
    avalanche_of_all,
    dense,
    fold_with_torch,
    not_finite_with_torch,
    signed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

__all__ = [
    "Algorithm",
    "LastPlan",
    "PendingSignatures",
    "SignaturePlan",
    "differing",
    "digest",
    "read_signatures",
    "recorded",
    "signature",
    "signatures",
]


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
        return _finished(_HostMemory(tensor).xxh3(), _tag(tensor, used))
    fold = _fold((tensor,))
    tag = _tag(tensor, used)  # while the device folds
    return _finished(int(fold.item()), tag)


def recorded(tensor: Tensor, signature: int) -> str:
    """Return a signature of this tensor as text, for ``differing``."""
    return f"{_algorithm_for(tensor, None).value}:{signature % 2**64:016x}"


def differing(tensors: Sequence[Tensor], expected: Sequence[tuple[str | None, Tensor]]) -> list[int]:
    """Return the positions of tensors that do not hold what is ``expected``: the same as when a signature was
    ``recorded``, or, without one of the same algorithm, the same bytes as another tensor."""
    found = signatures(tensors)
    differ = []
    for place, (tensor, own, (known, other)) in enumerate(zip(tensors, found, expected, strict=True)):
        if known is not None and known.startswith(f"{_algorithm_for(tensor, None).value}:"):
            is_same = recorded(tensor, own) == known
        else:
            is_same = signature(other, algorithm=_algorithm_for(tensor, None)) == own
        if not is_same:
            differ.append(place)
    return differ


def signatures(tensors: Iterable[Tensor], *, algorithm: Algorithm | str | None = None) -> list[int]:
    """Return the signature of each tensor, with one small transfer per device for all of them."""
    return PendingSignatures(tensors, algorithm=algorithm).read()


class SignaturePlan:
    """What stays the same from one time that some tensors are signed to the next.

    It may be started again as long as each tensor keeps its memory; the caller makes sure of that.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        *,
        algorithm: Algorithm | str | None = None,
    ) -> None:
        work = [(tensor, _algorithm_for(tensor, algorithm)) for tensor in map(_plain, tensors)]
        self.tags = np.array([_tag(tensor, used) for tensor, used in work], dtype=np.uint64)
        self.on_host = {
            place: _HostMemory(tensor) for place, (tensor, used) in enumerate(work) if used is Algorithm.XXH3
        }
        """By the position among all tensors."""
        self.on_devices: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
        """The positions and the tensors of each device."""
        for place, (tensor, used) in enumerate(work):
            if used is Algorithm.FOLD:
                places, group = self.on_devices.setdefault(tensor.device, ([], []))
                places.append(place)
                group.append(tensor)

    def start(self, *, finite: bool = False) -> PendingSignatures:
        """Sign the tensors as they are now, on the current stream of each device.

        ``finite`` also looks for NaN and infinity: see ``PendingSignatures.not_finite``.
        """
        return PendingSignatures.planned(self, finite=finite)


class LastPlan:
    """The plan for tensors that are signed again and again, made anew only when one of them has moved."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, ...]] = []
        self._plan: SignaturePlan | None = None

    def of(self, tensors: Iterable[Tensor]) -> SignaturePlan:
        """Return the plan for these tensors as they are now."""
        tensors = [*tensors]
        places = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in tensors]
        if self._plan is None or places != self._places:
            self._places = places
            self._plan = SignaturePlan(tensors)
        return self._plan


class PendingSignatures:
    """Signatures that are being computed on the devices of the tensors.

    The tensors may be changed or freed on the same stream as soon as this object exists.
    """

    def __init__(self, tensors: Iterable[Tensor], *, algorithm: Algorithm | str | None = None) -> None:
        self._start(SignaturePlan(tensors, algorithm=algorithm), finite=False)

    @classmethod
    def planned(cls, plan: SignaturePlan, *, finite: bool = False) -> PendingSignatures:
        started = cls.__new__(cls)
        started._start(plan, finite=finite)
        return started

    def _start(self, plan: SignaturePlan, *, finite: bool) -> None:
        self.folds = {device: _fold(group, finite=finite) for device, (_, group) in plan.on_devices.items()}
        """Device -> the folds that are computed there, and then the flags if those are asked for."""
        self._places = {device: places for device, (places, _) in plan.on_devices.items()}
        self._tags = plan.tags
        self._digests = np.zeros(len(plan.tags), dtype=np.uint64)
        for place, memory in plan.on_host.items():  # while the devices fold
            self._digests[place] = memory.xxh3()
        self._not_finite: set[int] = set()
        self._problem: RuntimeError | None = None
        if finite and plan.on_host:
            try:
                flags = not_finite_with_torch([each.tensor for each in plan.on_host.values()])
                self._not_finite.update(compress(plan.on_host, flags.tolist()))
            except RuntimeError as error:  # the signatures are good all the same
                self._problem = error

    def __len__(self) -> int:
        return len(self._tags)

    def read(self) -> list[int]:
        """Wait for the devices and return the signatures."""
        return read_signatures([self])[0]

    @property
    def not_finite(self) -> list[int]:
        """The positions of tensors with NaN or infinity, once the signatures are read, if that was asked.

        Asked are those of floating-point numbers of 16 to 64 bits. Raises ``RuntimeError`` if they could not
        be looked at.
        """
        if self._problem is not None:
            raise self._problem
        return sorted(self._not_finite)

    def finished(self, folded: Mapping[torch.device, Sequence[int]]) -> list[int]:
        """Return the signatures, given the values of ``folds``."""
        digests = self._digests.copy()
        for device, values in folded.items():
            places = self._places[device]
            digests[places] = np.array(values[: len(places)], dtype=np.int64).view(np.uint64)
            self._not_finite.update(compress(places, values[len(places) :]))
        found: list[int] = avalanche_of_all(digests + self._tags).view(np.int64).tolist()
        return found


def read_signatures(pending: Sequence[PendingSignatures]) -> list[list[int]]:
    """Read several pending signatures with one small transfer per device."""
    folds: dict[torch.device, list[Tensor]] = {}
    for each in pending:
        for device, fold in each.folds.items():
            folds.setdefault(device, []).append(fold)
    values = {device: iter(torch.cat(each).tolist()) for device, each in folds.items()}
    return [
        each.finished({device: [*islice(values[device], len(fold))] for device, fold in each.folds.items()})
        for each in pending
    ]


class _HostMemory:
    """The bytes of a tensor in host memory, row-major."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._bytes = _bytes_at(tensor) if dense(tensor) is tensor else None

    def xxh3(self) -> int:
        if self._bytes is not None:
            return xxhash.xxh3_64_intdigest(self._bytes)
        copied = dense(self.tensor)
        return xxhash.xxh3_64_intdigest(_bytes_at(copied))


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


def _bytes_at(tensor: Tensor) -> ctypes.Array[ctypes.c_ubyte] | bytes:
    """The memory of a dense tensor."""
    # Not a NumPy array: it would forbid to resize the storage, which is how FSDP frees its storages.
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


def _fold(tensors: Sequence[Tensor], *, finite: bool = False) -> Tensor:
    """Return the folds of tensors on one device, on that device, and as many flags if those are asked for."""
    if tensors[0].is_cuda and (fused := _fused_fold()) is not None:
        return fused(tensors, finite=finite)
    folds = torch.stack([fold_with_torch(tensor) for tensor in tensors])
    return torch.cat([folds, not_finite_with_torch(tensors)]) if finite else folds


@functools.cache
def _fused_fold() -> Callable[..., Tensor] | None:
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
