"""How a tensor lies, besides its bytes: on which device, with which strides, as which part of a distributed
one (paper, section 9: state stays sharded).

A checkpoint keeps what this rank has of a DTensor, and says of which whole it is a part. Nothing is gathered,
and nothing is laid out anew: another layout is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchscout.checkpoint.storage.encoding import fill
from torchscout.errors import CheckpointError
from torchscout.utils._torch import StridedShard

__all__ = ["CPU", "difference", "fits", "layout_of", "local_of", "rebuilt"]

CPU = torch.device("cpu")

_LIKE_PARAMETER = "parameter"
_WORDS = {
    "shape": "is part of a whole of shape",
    "mesh": "lies on a mesh of",
    "axes": "lies on a mesh with the axes",
    "coordinate": "is the part at",
    "placements": "is placed as",
}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it, the very memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # else it would be a new tensor that autograd knows
        local: torch.Tensor = tensor.to_local()
    return local


def layout_of(tensor: torch.Tensor, home: torch.device = CPU, parameter: torch.Tensor | None = None) -> Any:
    """What it takes, besides the bytes, to make it again; None for a dense one that is all here.

    ``home`` is the device where such tensors are expected. A slot is told relative to its ``parameter``.
    """
    found: dict[str, Any] = {}
    if tensor.device.type != home.type:
        found["device"] = tensor.device.type
    if isinstance(tensor, DTensor):
        found["whole"] = _LIKE_PARAMETER if _same_whole(tensor, parameter) else _whole(tensor)
    local = local_of(tensor)
    if not local.is_contiguous():
        found["strides"] = list(local.stride())
    return found or None


def difference(layout: Any, tensor: torch.Tensor) -> str | None:
    """How an existing tensor lies otherwise than the one that was kept, if it does; strides may differ."""
    kept = (layout or {}).get("whole")
    here = _whole(tensor) if isinstance(tensor, DTensor) else None
    if kept == here:
        return None
    if kept is None or here is None:
        was, now = ("whole", "a part of a distributed one")[:: 1 if kept is None else -1]
        return f"was {was} and is {now}"
    return "; ".join(
        f"{words} {here[key]}, was {kept.get(key)}"
        for key, words in _WORDS.items()
        if here[key] != kept.get(key)
    )


def fits(local: torch.Tensor, layout: Any, tensor: Any, parameter: torch.Tensor | None) -> bool:
    """Whether an existing tensor lies as the kept one did, so that its bytes can be put there."""
    if not isinstance(tensor, torch.Tensor):
        return False
    here = local_of(tensor)
    if (here.dtype, here.shape) != (local.dtype, local.shape):
        return False
    home = CPU if parameter is None else parameter.device
    return bool(layout_of(tensor, home, parameter) == layout)


def rebuilt(local: torch.Tensor, layout: Any, parameter: torch.Tensor | None) -> torch.Tensor:
    """A new tensor with these bytes that lies as the kept one did; ``parameter`` tells where home is."""
    layout = layout or {}
    home = CPU if parameter is None else parameter.device
    device = torch.device(layout["device"]) if "device" in layout else home
    made = _strided(local, layout.get("strides"), device)
    whole = layout.get("whole")
    if whole is None:
        return made
    if not isinstance(parameter, DTensor):
        raise CheckpointError("was part of a distributed tensor, and there is none to tell where the rest is")
    own = _whole(parameter)
    if whole == _LIKE_PARAMETER:
        whole = own
    if any(whole[key] != own[key] for key in ("mesh", "axes", "coordinate")):
        raise CheckpointError(f"lay on a mesh of {whole['mesh']}, its parameter lies on one of {own['mesh']}")
    return DTensor.from_local(
        made,
        parameter.device_mesh,
        [_placement(each) for each in whole["placements"]],
        run_check=False,
        shape=torch.Size(whole["shape"]),
        stride=tuple(whole["stride"]),
    )


def _strided(local: torch.Tensor, strides: Sequence[int] | None, device: torch.device) -> torch.Tensor:
    """The same numbers with these strides. Where those would put several numbers into one place, as in a
    window that slides, they lie densely; an expanded dimension is expanded again."""
    expanded = strides is not None and 0 in strides and local.numel() > 0
    kept = local[tuple(slice(0, 1 if step == 0 else None) for step in strides or ())] if expanded else local
    if strides is None or _overlaps(kept.shape, strides):
        strides = torch.empty(kept.shape, device="meta").stride()
    made = torch.empty_strided(kept.shape, strides, dtype=local.dtype, device=device)
    fill(made, kept)
    return made.expand(local.shape) if expanded else made


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices may mean the same place: sorted by step, each must step over all before it."""
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


def _whole(tensor: DTensor) -> dict[str, Any]:
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
    # By the exact class: one that is derived from these may mean something else.
    if (spell := _SPELLINGS.get(type(placement))) is None:
        raise CheckpointError(f"a checkpoint does not know how to keep a tensor placed as {placement}")
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
