"""Sends tensors from the source replica to its peers (paper, section 6.1.1, "Identical inputs").

The source describes what it has captured, peers allocate memory for it, and the bytes follow once all ranks
are ready. Of a DTensor only the local part is sent; each peer places it on its own mesh, which has other
ranks and the same shape.
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
    "as_dense",
    "captured",
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
    """Return the local part of a DTensor, after pending collectives; any other tensor as it is."""
    if not isinstance(tensor, DTensor | AsyncCollectiveTensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local.detach()


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """The mesh, placements and global shape of a DTensor."""

    mesh: DeviceMesh
    """The mesh of this rank's replica."""
    placements: tuple[Placement, ...]
    """Along each axis of the mesh."""
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> DTensorLayout | None:
        """Return None if ``tensor`` is not a DTensor."""
        if not isinstance(tensor, DTensor):
            return None
        return cls(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tensor.stride())

    @property
    def obstacle(self) -> str | None:
        """The first placement that cannot be described to a peer, or None."""
        return next((str(each) for each in self.placements if _placement_to_json(each) is None), None)

    def describe(self) -> dict[str, Any]:
        return {
            "mesh": _form(self.mesh),
            "placements": [_placement_to_json(each) for each in self.placements],
            "size": list(self.size),
            "stride": list(self.stride),
        }

    def like(self, description: Mapping[str, Any]) -> DTensorLayout:
        """Return the described layout on this rank's mesh; raise ``ReplayError`` if the meshes differ."""
        if (own := _form(self.mesh)) != description["mesh"]:
            source = _form_in_words(description["mesh"])
            raise ReplayError(f"a DTensor is on {_form_in_words(own)} here and on {source} on the source")
        return self.found(description, [self.mesh])

    @classmethod
    def found(cls, description: Mapping[str, Any], meshes: Sequence[DeviceMesh]) -> DTensorLayout:
        """Return the described layout on the first mesh that fits; raise ``ReplayError`` if none does."""
        mesh = next((mesh for mesh in meshes if _form(mesh) == description["mesh"]), None)
        if mesh is None:
            form = _form_in_words(description["mesh"])
            raise ReplayError(f"a DTensor was on {form}, and there is no such mesh here")
        placements = tuple(_PLACEMENTS[kind](*detail) for kind, *detail in description["placements"])
        return cls(mesh, placements, tuple(description["size"]), tuple(description["stride"]))

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Return a DTensor with this local part; nothing is communicated."""
        with torch.no_grad():
            mesh, size = self.mesh, torch.Size(self.size)
            return DTensor.from_local(
                local, mesh, self.placements, run_check=False, shape=size, stride=self.stride
            )


def _form(mesh: DeviceMesh) -> dict[str, Any]:
    """Return what the meshes of peers have in common: everything but their ranks."""
    return {
        "device": mesh.device_type,
        "shape": list(mesh.shape),
        "axes": list(mesh.mesh_dim_names or ()) or None,
    }


def _form_in_words(form: Mapping[str, Any]) -> str:
    axes = "" if form["axes"] is None else f" of axes {', '.join(form['axes'])}"
    return f"a {form['device']} mesh of shape {tuple(form['shape'])}{axes}"


def _placement_to_json(placement: Placement) -> list[Any] | None:
    # By exact class: subclasses divide tensors differently.
    if type(placement) is Replicate:
        return ["replicate"]
    if type(placement) is Shard:
        return ["shard", placement.dim]
    if type(placement) is Partial:
        return ["partial", placement.reduce_op]
    return None


_PLACEMENTS: dict[str, type[Placement]] = {"replicate": Replicate, "shard": Shard, "partial": Partial}

Broadcast = Callable[[torch.Tensor], None]
"""Requests the source's values for a contiguous tensor, on every peer; they arrive before the computation."""
_PACKED = 1 << 20
"""Tensors in host memory up to this number of bytes are sent together."""


def captured(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense copy, which later training cannot change."""
    refuse(tensor)
    return _laid_out(local_part(tensor).detach().resolve_conj().resolve_neg().clone(), tensor)


def refuse(tensor: torch.Tensor) -> None:
    """Raise ``ReplayError`` if the tensor cannot be sent as plain bytes."""
    if (found := obstacle(tensor)) is not None:
        raise ReplayError(f"{found} is among the inputs")


def obstacle(tensor: torch.Tensor) -> str | None:
    """Return the kind of a tensor that cannot be sent as plain bytes; None if it can."""
    layout, local = DTensorLayout.of(tensor), tensor
    if layout is not None:
        if layout.obstacle is not None:
            return f"a DTensor placed as {layout.obstacle}"
        local = tensor._local_tensor  # type: ignore[attr-defined]  # does not wait: peers only look at its type
    if type(local) not in (torch.Tensor, torch.nn.Parameter, AsyncCollectiveTensor):
        return f"a {type(local).__name__}" if layout is None else f"a DTensor of {type(local).__name__}"
    if local.layout is not torch.strided or local.is_quantized or local.is_meta:
        return f"a {local.layout} tensor of {local.dtype}"
    return None


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without gaps or overlaps in memory: itself if possible, else a copy."""
    plain = local_part(tensor).resolve_conj().resolve_neg()
    return _laid_out(plain if is_dense(plain) else plain.clone(), tensor)


def described(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what a peer must know to allocate memory for the ``captured`` tensor."""
    local, layout = local_part(tensor), DTensorLayout.of(tensor)
    return {
        "dtype": str(local.dtype).removeprefix("torch."),
        "size": list(local.shape),
        "stride": list(torch.empty_like(local, device="meta").stride()),  # of a dense copy
        "device": local.device.type,
        **({} if layout is None else {"layout": layout.describe()}),
    }


def room_for(
    description: Mapping[str, Any], device: torch.device, own: DTensorLayout | None = None
) -> torch.Tensor:
    """Return an uninitialized tensor as described; ``device`` is this rank's accelerator, or the CPU.

    ``own`` is the layout of this rank's corresponding tensor, if that is a DTensor.
    """
    layout = description.get("layout")
    if (layout is None) != (own is None):
        here, there = ("no DTensor", "one") if own is None else ("a DTensor", "none")
        raise ReplayError(f"there is {here} here and {there} on the source")
    where = device if description["device"] == device.type else torch.device(description["device"])
    dtype = getattr(torch, description["dtype"])
    room = torch.empty_strided(description["size"], description["stride"], dtype=dtype, device=where)
    return room if layout is None or own is None else own.like(layout).wrap(room)


def receive(tensors: Iterable[torch.Tensor], broadcast: Broadcast) -> None:
    """Request the source's bytes for each tensor."""
    for tensor in tensors:
        if local_part(tensor).numel():
            # As bytes in memory order: works for any dtype, and dense tensors need no copy.
            broadcast(flat(local_part(tensor)).view(torch.uint8))


def receive_together(tensors: Sequence[torch.Tensor], broadcast: Broadcast) -> None:
    """Overwrite contiguous byte tensors with the source's; small ones in host memory share one broadcast.

    Every rank waits for each broadcast among hosts; broadcasts among devices are asynchronous.
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
    """Return a dense tensor's elements in memory order."""
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
    """Return the memory as a DTensor if ``like`` is one."""
    layout = DTensorLayout.of(like)
    if layout is None or not isinstance(like, DTensor):
        return local
    again = layout.wrap(local)
    if again._spec != like._spec:
        raise ReplayError(f"a DTensor with the unusual shard order {like._spec} cannot be described to peers")
    return again
