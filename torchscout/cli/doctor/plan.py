"""The job that this machine is to take part in, as far as its user tells. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torchscout.mesh import AXES, Mesh

__all__ = ["BYTES_PER_PARAMETER", "Plan", "laid_out", "mesh_of"]

BYTES_PER_PARAMETER = 12
"""A weight of float32, and two slots of Adam's."""
_MOST_RANKS = 100_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of the job."""

    ranks: int
    """On this machine, and on each other one."""
    machines: int = 1
    state_bytes: int | None = None
    """Of one rank: parameters, buffers, all that optimizers keep."""
    mesh: Mesh | None = None
    has_experts: bool = False
    """Whether the mesh has expert layers laid out otherwise than dense ones."""

    @property
    def world_size(self) -> int:
        return self.ranks * self.machines if self.mesh is None else len(self.mesh)

    @property
    def hosts(self) -> list[str]:
        return [f"machine {number}" for number in range(self.machines) for _ in range(self.ranks)]


def mesh_of(told: str, experts: int = 1) -> Mesh:
    """From ``replica=4,shard=2``; a ``ValueError`` says what is wrong with it."""
    degrees: dict[str, Any] = {}
    for part in told.split(","):
        axis, _, degree = (each.strip() for each in part.partition("="))
        if axis not in AXES:
            raise ValueError(f"unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        if axis in degrees:
            raise ValueError(f"{axis} is given twice")
        if not degree.isdigit():
            raise ValueError(f"the degree of {axis} must be a number, got {degree!r}")
        degrees[axis] = int(degree)
    if (world := math.prod(degrees.values())) > _MOST_RANKS:
        raise ValueError(f"at most {_MOST_RANKS} ranks can be looked at, got {world}")
    mesh = Mesh.grid(**degrees)
    return mesh if experts == 1 else mesh.carve_experts(experts, out_of=mesh.peer_axis())


def laid_out(world: int | None, ranks: int | None, machines: int | None, devices: int) -> tuple[int, int]:
    """Ranks on each machine, and machines; what is not told follows from the mesh or the devices here."""
    if world is None:
        return ranks or devices or 1, machines or 1
    here = ranks or (-(-world // machines) if machines else min(devices or world, world))
    needed = -(-world // here)
    if machines is not None and machines != needed:
        raise ValueError(f"the mesh has {world} ranks: {needed} machines with {here} each, not {machines}")
    if (ranks or machines) and here * needed != world:
        told = f"{ranks} on each machine" if ranks else f"{machines} machines"
        raise ValueError(f"the mesh has {world} ranks, which cannot be divided into {told}")
    return here, needed
