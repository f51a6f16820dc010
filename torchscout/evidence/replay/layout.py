"""DTensors in replay: what this rank holds of one, and how it lies on a mesh (paper, section 6.1.1).

Only the local part travels. A peer puts it on a mesh of its own, which has other ranks and the same form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchscout.errors import ReplayError

__all__ = ["Layout", "local_part"]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank behind a tensor, the collective that fills it awaited; mostly itself."""
    if not isinstance(tensor, DTensor | AsyncCollectiveTensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local.detach()


@dataclass(frozen=True, slots=True)
class Layout:
    """How the parts that ranks hold form the whole of a DTensor."""

    mesh: DeviceMesh
    """Of this rank's own copy of the model."""
    placements: tuple[Placement, ...]
    """Along each axis of the mesh."""
    size: tuple[int, ...]
    """Of the whole."""
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Layout | None:
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

    def like(self, told: Mapping[str, Any]) -> Layout:
        """The source's layout on this rank's mesh; a ``ReplayError`` says how the meshes differ."""
        if (own := _form(self.mesh)) != told["mesh"]:
            raise ReplayError(
                f"a DTensor lies on {_said(own)} here and on {_said(told['mesh'])} on the source"
            )
        placements = tuple(_placement(*each) for each in told["placements"])
        return Layout(self.mesh, placements, tuple(told["size"]), tuple(told["stride"]))

    @classmethod
    def found(cls, told: Mapping[str, Any], meshes: Sequence[DeviceMesh]) -> Layout:
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
