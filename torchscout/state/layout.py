"""Describes how a tensor lies in memory and on ranks, and copies its bytes (paper, section 9: state stays
sharded).

Of a DTensor a checkpoint stores this rank's local tensor and its layout. Nothing is gathered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchscout.errors import CheckpointError
from torchscout.state.dtypes import ITEM_BYTES
from torchscout.utils._torch import StridedShard, local_of

__all__ = [
    "CPU",
    "LIKE_PARAMETER",
    "bytes_of",
    "distribution_of",
    "dtype_named",
    "empty_tensor",
    "fill",
    "layout_of",
    "name_of",
    "placement_from_json",
    "placement_to_json",
    "why_not_bytes",
]

CPU = torch.device("cpu")
LIKE_PARAMETER = "parameter"
"""In place of a slot's distribution if it is that of its parameter."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    if name not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {name!r:.40}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def empty_tensor(dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Uninitialized host memory; ``dtype`` is torch's name of it."""
    return torch.empty(tuple(shape), dtype=dtype_named(dtype), device="cpu")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's memory; valid only while the tensor is alive."""
    size = tensor.nbytes
    # Not via NumPy, which makes the storage non-resizable and does not support all dtypes.
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else bytearray()
    return memoryview(array).cast("B")


def why_not_bytes(tensor: torch.Tensor) -> str | None:
    """Why this tensor cannot be stored as plain bytes; None if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return (
            f"is a {type(tensor).__name__}, which does not hold its own data; pass the local tensor it wraps"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"is a {tensor.layout} tensor of {tensor.dtype}, which is not one dense block of memory"
    if tensor.is_meta:
        return "is a meta tensor, which has no bytes"
    if name_of(tensor.dtype) not in ITEM_BYTES:
        return f"is a tensor of {tensor.dtype}, which cannot be stored as bytes"
    return None


def fill(tensor: torch.Tensor, source: torch.Tensor, *, wait: bool = True) -> None:
    """Copy the source's bits into a tensor of any strides and device; asynchronously unless ``wait``."""
    with torch.no_grad():
        if tensor.is_conj() or tensor.is_neg():  # its memory does not hold its values
            tensor.copy_(source)
        else:
            _as_integers(tensor).copy_(
                _as_integers(source.resolve_conj().resolve_neg()), non_blocking=not wait
            )


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, which every device copies bit by bit."""
    kind = _INTEGERS.get(tensor.itemsize)
    return tensor.detach() if kind is None else tensor.detach().view(kind)


def layout_of(tensor: torch.Tensor, home: torch.device = CPU, parameter: torch.Tensor | None = None) -> Any:
    """What is needed besides the bytes to rebuild a tensor; None for a dense, local one on device ``home``.

    The layout of an optimizer slot is relative to its ``parameter``.
    """
    found: dict[str, Any] = {}
    if tensor.device.type != home.type:
        found["device"] = tensor.device.type
    if isinstance(tensor, DTensor):
        is_alike = isinstance(parameter, DTensor) and _distribution(tensor) == _distribution(parameter)
        found["whole"] = LIKE_PARAMETER if is_alike else distribution_of(tensor)
    local = local_of(tensor)
    if not local.is_contiguous():
        found["strides"] = list(local.stride())
    return found or None


def distribution_of(tensor: DTensor) -> dict[str, Any]:
    """The global tensor, the mesh that it is distributed on, and this rank's place there."""
    mesh = tensor.device_mesh
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "mesh": list(mesh.shape),
        "axes": list(mesh.mesh_dim_names or ()),
        "coordinate": list(mesh.get_coordinate() or ()),
        "placements": [placement_to_json(each) for each in tensor.placements],
    }


def _distribution(tensor: DTensor) -> tuple[Any, ...]:
    """What two tensors with the same ``distribution_of`` have in common; it takes less time."""
    return tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()


_PLACEMENTS: dict[str, tuple[type[Placement], tuple[str, ...]]] = {
    "shard": (Shard, ("dim",)),
    "strided": (StridedShard, ("dim", "split_factor")),
    "replicate": (Replicate, ()),
    "partial": (Partial, ("reduce_op",)),
}
"""Each kind of placement with its arguments."""


def placement_to_json(placement: Placement) -> list[Any]:
    for word, (kind, arguments) in _PLACEMENTS.items():
        if type(placement) is kind:  # a subclass may mean something else
            return [word, *(getattr(placement, name) for name in arguments)]
    raise CheckpointError(f"a checkpoint cannot store a tensor placed as {placement}")


def placement_from_json(document: Sequence[Any]) -> Placement:
    word, *values = document
    kind, arguments = _PLACEMENTS[word]
    return kind(**dict(zip(arguments, values, strict=True)))
