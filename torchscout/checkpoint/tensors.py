"""Tensors as the bytes of a shard and back (paper, section 9). Bits are not interpreted: NaNs keep theirs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

import torch

from torchscout.checkpoint.shard_format import ITEM_BYTES, Blob, Entry
from torchscout.decision.fold import memory_of

__all__ = ["blob_of", "blobs_of", "bytes_of", "dtype_named", "fill", "name_of", "objection", "room_for"]

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def objection(tensor: torch.Tensor) -> str | None:
    """Why this tensor cannot be kept as plain bytes, if it cannot."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__} keeps its numbers elsewhere; pass the local tensor it is made of"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"a {tensor.layout} tensor of {tensor.dtype} is not one block of numbers"
    if tensor.is_meta:
        return "a meta tensor has no bytes"
    if name_of(tensor.dtype) not in ITEM_BYTES:
        return f"{tensor.dtype} has no bytes of its own"
    return None


def blobs_of(tensors: Mapping[str, torch.Tensor]) -> list[Blob]:
    return [blob_of(name, tensor) for name, tensor in tensors.items()]


def blob_of(name: str, tensor: torch.Tensor) -> Blob:
    """The tensor's own memory where it is on the CPU and contiguous, a copy otherwise."""
    if why := objection(tensor):
        raise ValueError(f"{name}: {why}")
    memory = memory_of(tensor.detach().cpu())
    return Blob(name, name_of(tensor.dtype), tuple(tensor.shape), bytes_of(memory), memory)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory, to be read or filled; valid only while the tensor lives."""
    size = tensor.nbytes
    # Not through NumPy, which forbids the storage ever to be resized and does not know all dtypes.
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else bytearray()
    return memoryview(array).cast("B")


def fill(tensor: torch.Tensor, source: torch.Tensor, *, wait: bool = True) -> None:
    """Give it the source's bits, strided or not, from whichever device, perhaps later in that one's order."""
    with torch.no_grad():
        if tensor.is_conj() or tensor.is_neg():  # its memory does not hold what it says
            tensor.copy_(source)
        else:
            _whole(tensor).copy_(_whole(source.resolve_conj().resolve_neg()), non_blocking=not wait)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers, which every device copies as they are."""
    kind = _WHOLE.get(tensor.itemsize)
    return tensor.detach() if kind is None else tensor.detach().view(kind)


def room_for(entries: Iterable[Entry]) -> dict[str, torch.Tensor]:
    """Uninitialized CPU tensors to read these into."""
    return {
        entry.name: torch.empty(entry.shape, dtype=dtype_named(entry.dtype), device="cpu")
        for entry in entries
    }


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    if name not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {name!r:.40}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
