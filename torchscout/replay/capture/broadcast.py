"""Sends tensors from the source replica to its peers (paper, section 6.1.1, "Identical inputs").

The source describes what it has captured, peers allocate memory for it, and the bytes follow once all
ranks are ready. Of a DTensor only this rank's local part is sent; a peer puts it on a mesh of its own,
which has other ranks and the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchscout.errors import ReplayError
from torchscout.utils._torch import AsyncCollectiveTensor

__all__ = [
    "Broadcast",
    "DTensorLayout",
    "captured",
    "densely",
    "described",
    "flat",
    "is_dense",
    "local_part",
    "obstacle",
    "receive",
    "receive_together",
    "refuse",
    "room_for",
]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank behind a tensor, the collective that fills it awaited; mostly itself."""
    if not isinstance(tensor, DTensor | AsyncCollectiveTensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local.detach()


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """How the parts that ranks hold form the whole of a DTensor."""

    mesh: DeviceMesh
    """Of this rank's own copy of the model."""
    placements: tuple[Placement, ...]
    """Along each axis of the mesh."""
    size: tuple[int, ...]
    """Of the whole."""
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> DTensorLayout | None:
        """None for what is no DTensor."""
        if not isinstance(tensor, DTensor):
            return None
        return cls(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tensor.stride())

    @property
    def obstacle(self) -> str | None:
        """What kind of placement cannot be spelled for a peer, if there is one."""
        return next((str(each) for each in self.placements if _spelled(each) is None), None)

    def describe(self) -> dict[str, Any]:
        return {
            "mesh": _form(self.mesh),
            "placements": [_spelled(each) for each in self.placements],
            "size": list(self.size),
            "stride": list(self.stride),
        }

    def like(self, told: Mapping[str, Any]) -> DTensorLayout:
        """The source's layout on this rank's mesh; a ``ReplayError`` says how the meshes differ."""
        if (own := _form(self.mesh)) != told["mesh"]:
            raise ReplayError(
                f"a DTensor lies on {_said(own)} here and on {_said(told['mesh'])} on the source"
            )
        placements = tuple(_placement(*each) for each in told["placements"])
        return DTensorLayout(self.mesh, placements, tuple(told["size"]), tuple(told["stride"]))

    @classmethod
    def found(cls, told: Mapping[str, Any], meshes: Sequence[DeviceMesh]) -> DTensorLayout:
        """The layout on whichever of these meshes has its form; a ``ReplayError`` if none has."""
        alike = next((mesh for mesh in meshes if _form(mesh) == told["mesh"]), None)
        if alike is None:
            raise ReplayError(f"a DTensor lay on {_said(told['mesh'])}, and there is no such mesh here")
        placements = tuple(_placement(*each) for each in told["placements"])
        return cls(alike, placements, tuple(told["size"]), tuple(told["stride"]))

    def wrap(self, local: torch.Tensor) -> DTensor:
        """A DTensor over this memory; nothing is communicated."""
        with torch.no_grad():
            return DTensor.from_local(
                local,
                self.mesh,
                self.placements,
                run_check=False,
                shape=torch.Size(self.size),
                stride=self.stride,
            )


def _form(mesh: DeviceMesh) -> dict[str, Any]:
    """What meshes of peers have in common: all but their ranks."""
    return {
        "device": mesh.device_type,
        "shape": list(mesh.shape),
        "axes": list(mesh.mesh_dim_names or ()) or None,
    }


def _said(form: Mapping[str, Any]) -> str:
    axes = "" if form["axes"] is None else f" of axes {', '.join(form['axes'])}"
    return f"a {form['device']} mesh of shape {tuple(form['shape'])}{axes}"


def _spelled(placement: Placement) -> list[Any] | None:
    # By exact class: those derived from them are divided in other ways.
    if type(placement) is Replicate:
        return ["replicate"]
    if type(placement) is Shard:
        return ["shard", placement.dim]
    if type(placement) is Partial:
        return ["partial", placement.reduce_op]
    return None


def _placement(kind: str, *detail: Any) -> Placement:
    kinds: dict[str, type[Placement]] = {"replicate": Replicate, "shard": Shard, "partial": Partial}
    return kinds[kind](*detail)


Broadcast = Callable[[torch.Tensor], None]
"""Fills a contiguous tensor, on every peer, with what the source's holds; by the time of the computation."""
_PACKED = 1 << 20
"""Bytes up to which a tensor in host memory travels together with others."""


def captured(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that later training cannot change; dense, with the strides of the original where they are."""
    refuse(tensor)
    return _laid_out(local_part(tensor).detach().resolve_conj().resolve_neg().clone(), tensor)


def refuse(tensor: torch.Tensor) -> None:
    """Raise ``ReplayError`` for what does not travel as plain bytes."""
    if (found := obstacle(tensor)) is not None:
        raise ReplayError(f"{found} is among the inputs")


def obstacle(tensor: torch.Tensor) -> str | None:
    """What kind of tensor it is, if one that does not travel as plain bytes."""
    layout, local = DTensorLayout.of(tensor), tensor
    if layout is not None:
        if layout.obstacle is not None:
            return f"a DTensor placed as {layout.obstacle}"
        local = tensor._local_tensor  # type: ignore[attr-defined]  # not awaited: peers look without reading
    if type(local) not in (torch.Tensor, torch.nn.Parameter, AsyncCollectiveTensor):
        return f"a {type(local).__name__}" if layout is None else f"a DTensor of {type(local).__name__}"
    if local.layout is not torch.strided or local.is_quantized or local.is_meta:
        return f"a {local.layout} tensor of {local.dtype}"
    return None


def densely(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as plain bytes in one block, itself where it is that; expanded and sliced ones are not."""
    plain = local_part(tensor).resolve_conj().resolve_neg()
    return _laid_out(plain if is_dense(plain) else plain.clone(), tensor)


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """What a peer must know to make room for what ``captured`` makes, or has made, of this tensor."""
    local, layout = local_part(tensor), DTensorLayout.of(tensor)
    return {
        "dtype": str(local.dtype).removeprefix("torch."),
        "size": list(local.shape),
        "stride": list(_dense_stride(local)),
        "device": local.device.type,
        **({} if layout is None else {"layout": layout.describe()}),
    }


def room_for(
    description: Mapping[str, Any], device: torch.device, own: DTensorLayout | None = None
) -> torch.Tensor:
    """An uninitialized tensor as described; ``device`` is this rank's own accelerator, or the CPU.

    ``own`` is how this rank's tensor of the same use lies on a mesh, where that is a DTensor.
    """
    told = description.get("layout")
    if (told is None) != (own is None):
        here, there = ("no DTensor", "one") if own is None else ("a DTensor", "none")
        raise ReplayError(f"there is {here} here and {there} on the source")
    where = device if description["device"] == device.type else torch.device(description["device"])
    dtype = getattr(torch, description["dtype"])
    room = torch.empty_strided(description["size"], description["stride"], dtype=dtype, device=where)
    return room if told is None or own is None else own.like(told).wrap(room)


def receive(tensors: Iterable[torch.Tensor], broadcast: Broadcast) -> None:
    """Fill the tensors with the source's bytes, one by one."""
    for tensor in tensors:
        if local_part(tensor).numel():
            # As bytes in the order of memory: any dtype travels, and dense strides need no copy.
            broadcast(flat(local_part(tensor)).view(torch.uint8))


def receive_together(tensors: Sequence[torch.Tensor], broadcast: Broadcast) -> None:
    """Fill contiguous tensors of bytes with the source's, the small ones in host memory by one broadcast.

    Each broadcast among hosts is a round trip that everybody waits for; those among devices are not.
    """
    small = [each for each in tensors if each.is_cpu and each.numel() <= _PACKED]
    for each in tensors:
        if not each.is_cpu or each.numel() > _PACKED or len(small) == 1:
            broadcast(each)
    if len(small) > 1:
        packed = torch.cat(small)
        broadcast(packed)
        place = 0
        for each in small:
            each.copy_(packed[place : place + each.numel()])
            place += each.numel()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _laid_out(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The memory as a DTensor, where that is what it was taken from."""
    layout = DTensorLayout.of(like)
    if layout is None or not isinstance(like, DTensor):
        return local
    again = layout.wrap(local)
    if again._spec != like._spec:
        raise ReplayError(f"a DTensor in an order of its own, {like._spec}, cannot be described to peers")
    return again


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """What a copy has: the tensor's own strides if it fills its memory, else the same order without gaps."""
    return torch.empty_like(tensor, device="meta").stride()
