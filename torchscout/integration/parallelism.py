"""From what a user says about parallelism to a mesh (paper, section 4)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from torchscout.config import Parallelism
from torchscout.mesh import AXES, Mesh

__all__ = ["mesh_along", "mesh_from"]

# The names that PyTorch's own examples, TorchTitan and users give to the axes of a DeviceMesh.
_NAMES = {
    "replica": ("replica", "replicate", "dp_replicate", "ddp", "dp"),
    "shard": ("shard", "fsdp", "dp_shard"),
    "tensor": ("tensor", "tp"),
    "pipeline": ("pipeline", "pp", "stage"),
    "context": ("context", "cp"),
    "expert": ("expert", "ep"),
}
_AXIS = {name: axis for axis, names in _NAMES.items() for name in names}


def mesh_from(
    parallelism: Mesh | DeviceMesh | Parallelism,
    world_size: int,
    hosts: Sequence[str],
    sharded: Collection[str] = (),
) -> Mesh:
    """The mesh a user described, with the machines that were found.

    ``sharded`` are axes of a DeviceMesh along which FSDP shards: ``dp`` may mean that, or replicas.
    """
    if isinstance(parallelism, Mesh):
        mesh = parallelism
    elif isinstance(parallelism, Parallelism):
        mesh = Mesh.grid(**{axis: getattr(parallelism, axis) for axis in AXES})
        if parallelism.carved_experts > 1:
            mesh = mesh.carve_experts(parallelism.carved_experts, out_of=mesh.peer_axis())
    else:
        mesh = mesh_along(parallelism, _axes_of(parallelism, sharded))
    if len(mesh) != world_size:
        raise ValueError(f"parallelism describes {len(mesh)} ranks, the job has {world_size}")
    return mesh if mesh.host_of(0) is not None else mesh.on(hosts)


def mesh_along(device_mesh: DeviceMesh, axes: Sequence[str]) -> Mesh:
    """A DeviceMesh as a mesh, its axes by our names."""
    ranks = device_mesh.mesh.numpy()
    if sorted(ranks.flatten().tolist()) != list(range(ranks.size)):
        raise ValueError("the DeviceMesh does not hold every rank once; pass parallelism=Parallelism(...)")
    table = np.zeros((ranks.size, len(AXES)), dtype=np.int64)
    for axis, coordinates in zip(axes, np.indices(ranks.shape), strict=True):
        table[ranks.flatten(), AXES.index(axis)] = coordinates.flatten()
    return Mesh(table)


def _axes_of(device_mesh: DeviceMesh, sharded: Collection[str]) -> list[str]:
    names = device_mesh.mesh_dim_names or ()
    if unknown := [name for name in names if name not in _AXIS]:
        known = "; ".join(f"{axis}: {', '.join(names)}" for axis, names in _NAMES.items())
        raise ValueError(
            f"unknown mesh axes {unknown}; known are {known}. Or pass parallelism=Parallelism(...)"
        )
    axes = [_AXIS[name] for name in names]
    axes = [
        "shard" if axis == "replica" and name in sharded else axis
        for name, axis in zip(names, axes, strict=True)
    ]
    if not names or len(set(axes)) < len(axes):
        raise ValueError(
            f"a DeviceMesh needs a name for each axis, each another one, got {names}; "
            "or pass parallelism=Parallelism(...)"
        )
    return axes
