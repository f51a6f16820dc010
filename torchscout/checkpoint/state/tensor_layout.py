"""Describes a tensor's device, strides and distribution, so that it can be rebuilt from its bytes (paper,
section 9: state stays sharded).

Of a DTensor a checkpoint stores this rank's local tensor and its layout. Nothing is gathered or resharded: a
different layout is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchscout.checkpoint.storage.encoding import fill
from torchscout.errors import CheckpointError
from torchscout.utils._torch import StridedShard

__all__ = ["CPU", "difference", "fits", "layout_of", "local_of", "rebuilt", "whole_of"]

CPU = torch.device("cpu")

_LIKE_PARAMETER = "parameter"
_WORDS = {
    "shape": "has global shape",
    "mesh": "is on a mesh of",
    "axes": "is on a mesh with axes",
    "coordinate": "is the part at",
    "placements": "has placements",
}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's local tensor, sharing memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # otherwise it would be a new tensor in the autograd graph
        local: torch.Tensor = tensor.to_local()
    return local


def layout_of(tensor: torch.Tensor, home: torch.device = CPU, parameter: torch.Tensor | None = None) -> Any:
    """What is needed besides the bytes to rebuild a tensor; None for a dense, local one on device ``home``.

    The layout of an optimizer slot is relative to its ``parameter``.
    """
    found: dict[str, Any] = {}
    if tensor.device.type != home.type:
        found["device"] = tensor.device.type
    if isinstance(tensor, DTensor):
        found["whole"] = _LIKE_PARAMETER if _same_whole(tensor, parameter) else whole_of(tensor)
    local = local_of(tensor)
    if not local.is_contiguous():
        found["strides"] = list(local.stride())
    return found or None


def difference(layout: Any, tensor: torch.Tensor) -> str | None:
    """How an existing tensor's distribution differs from the saved one; None if it does not."""
    kept = (layout or {}).get("whole")
    here = whole_of(tensor) if isinstance(tensor, DTensor) else None
    if kept == here:
        return None
    if kept is None or here is None:
        was, now = ("a plain tensor", "a DTensor")[:: 1 if kept is None else -1]
        return f"was {was} and is {now}"
    return "; ".join(
        f"{words} {here[key]}, was {kept.get(key)}"
        for key, words in _WORDS.items()
        if here[key] != kept.get(key)
    )


def fits(local: torch.Tensor, layout: Any, tensor: Any, parameter: torch.Tensor | None) -> bool:
    """Whether the saved bytes can be copied into an existing tensor, because its layout is the same."""
    if not isinstance(tensor, torch.Tensor):
        return False
    here = local_of(tensor)
    if (here.dtype, here.shape) != (local.dtype, local.shape):
        return False
    home = CPU if parameter is None else parameter.device
    return bool(layout_of(tensor, home, parameter) == layout)


def rebuilt(local: torch.Tensor, layout: Any, parameter: torch.Tensor | None) -> torch.Tensor:
    """A new tensor with these bytes and the saved layout; ``parameter`` determines device and mesh.

    Raises ``CheckpointError`` if there is no such mesh.
    """
    layout = layout or {}
    home = CPU if parameter is None else parameter.device
    device = torch.device(layout["device"]) if "device" in layout else home
    made = _strided(local, layout.get("strides"), device)
    whole = layout.get("whole")
    if whole is None:
        return made
    if not isinstance(parameter, DTensor):
        raise CheckpointError("was a DTensor, but its parameter is not")
    own = whole_of(parameter)
    if whole == _LIKE_PARAMETER:
        whole = own
    if any(whole[key] != own[key] for key in ("mesh", "axes", "coordinate")):
        raise CheckpointError(f"was on a mesh of {whole['mesh']}, its parameter is on one of {own['mesh']}")
    return DTensor.from_local(
        made,
        parameter.device_mesh,
        [_placement(each) for each in whole["placements"]],
        run_check=False,
        shape=torch.Size(whole["shape"]),
        stride=tuple(whole["stride"]),
    )


def _strided(local: torch.Tensor, strides: Sequence[int] | None, device: torch.device) -> torch.Tensor:
    """A copy with these strides; expanded dimensions are expanded again. If elements would overlap otherwise,
    as in a sliding window, the copy is dense."""
    expanded = strides is not None and 0 in strides and local.numel() > 0
    kept = local[tuple(slice(0, 1 if step == 0 else None) for step in strides or ())] if expanded else local
    if strides is None or _overlaps(kept.shape, strides):
        strides = torch.empty(kept.shape, device="meta").stride()
    made = torch.empty_strided(kept.shape, strides, dtype=local.dtype, device=device)
    fill(made, kept)
    return made.expand(local.shape) if expanded else made


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements may share memory: sorted, each stride must exceed the extent of those before it."""
    reach = 0
    for step, size in sorted((step, size) for size, step in zip(shape, strides, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _same_whole(tensor: DTensor, parameter: torch.Tensor | None) -> bool:
    return (
        isinstance(parameter, DTensor)
        and tensor.device_mesh == parameter.device_mesh
        and tensor.placements == parameter.placements
        and tensor.shape == parameter.shape
        and tensor.stride() == parameter.stride()
    )


def whole_of(tensor: DTensor) -> dict[str, Any]:
    mesh = tensor.device_mesh
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "mesh": list(mesh.shape),
        "axes": list(mesh.mesh_dim_names or ()),
        "coordinate": list(mesh.get_coordinate() or ()),
        "placements": [_spelled(each) for each in tensor.placements],
    }


def _spelled(placement: Placement) -> list[Any]:
    # By exact class: a subclass may mean something else.
    if (spell := _SPELLINGS.get(type(placement))) is None:
        raise CheckpointError(f"a checkpoint cannot store a tensor placed as {placement}")
    return spell(placement)


_SPELLINGS: dict[type, Callable[[Any], list[Any]]] = {
    Shard: lambda placement: ["shard", placement.dim],
    StridedShard: lambda placement: ["strided", placement.dim, placement.split_factor],
    Replicate: lambda _: ["replicate"],
    Partial: lambda placement: ["partial", placement.reduce_op],
}


def _placement(spelled: Any) -> Placement:
    kind, *values = spelled
    if kind == "strided":
        return StridedShard(values[0], split_factor=values[1])
    kinds: dict[str, type[Placement]] = {"shard": Shard, "replicate": Replicate, "partial": Partial}
    return kinds[kind](*values)
