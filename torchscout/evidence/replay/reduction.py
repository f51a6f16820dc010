"""What FSDP does with gradients, once more on scratch tensors (paper, sections 6.1.2 and 9).

A reduce-scatter among the shards and, where replicas hold the same shards, an all-reduce among those, on
training's own groups and as large as training's. One of each for a whole layer, however many parts of it
FSDP keeps apart. No gradient of training is touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from torchscout.decision.signature import PendingSignatures
from torchscout.mesh import Axis, LayerKind, Mesh

__all__ = ["Reduction", "Route", "reduce_scatter", "route_of"]

# Renamed in PyTorch 2.13, where the former name warns.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Route:
    """The groups that the gradients of this rank's shards go over."""

    shard: dist.ProcessGroup
    replica: dist.ProcessGroup | None
    """None where each shard has one owner."""
    dimension: int
    """Which axis of the parameters' device mesh the shards lie along."""


def route_of(
    parameters: Sequence[torch.Tensor], mesh: Mesh, rank: int, role: LayerKind = LayerKind.DENSE
) -> Route | None:
    """None where parameters are not sharded as the mesh says, or not all alike."""
    meshes = {each.device_mesh for each in parameters if isinstance(each, DTensor)}
    if len(meshes) != 1 or not all(isinstance(each, DTensor) for each in parameters):
        return None
    (devices,) = meshes
    along = {
        tuple(sorted(dist.get_process_group_ranks(devices.get_group(dimension)))): dimension
        for dimension in range(devices.ndim)
        if devices.size(dimension) > 1
    }
    dimension = along.get(mesh.ranks_along(Axis.SHARD, rank, role))
    if dimension is None:
        return None
    replicas = along.get(mesh.ranks_along(Axis.REPLICA, rank, role))
    replica = None if replicas is None else devices.get_group(replicas)
    return Route(devices.get_group(dimension), replica, dimension)


class Reduction:
    """Of one layer's gradients. Its memory is taken when it is made, so that ``run`` finds it there."""

    def __init__(self, route: Route, parameters: Sequence[torch.Tensor]) -> None:
        self._route = route
        ranks = route.shard.size()
        part = math.ceil(sum(_whole_size(each, route) for each in parameters) / ranks)
        local = parameters[0].to_local() if isinstance(parameters[0], DTensor) else parameters[0]
        self._given = local.new_zeros(ranks * part, requires_grad=False)
        self._got = local.new_zeros(part, requires_grad=False)

    @property
    def has_copies(self) -> bool:
        """Whether other replicas end up with the same shards of gradients."""
        return self._route.replica is not None

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """What is to be reduced. Without it zeros are: a rank that failed still takes part."""
        place = 0
        for each in gradients:
            if each is not None:
                flat = (each.to_local() if isinstance(each, DTensor) else each).detach().flatten()
                self._given[place : place + flat.numel()].copy_(flat)
                place += flat.numel()

    def run(self) -> list[PendingSignatures]:
        """Signatures of this rank's shard: reduced among the shards, then also among the replicas."""
        reduce_scatter(self._got, self._given, op=dist.ReduceOp.AVG, group=self._route.shard)
        scattered = PendingSignatures([self._got])
        self._given.zero_()
        if self._route.replica is None:
            return [scattered]
        dist.all_reduce(self._got, op=dist.ReduceOp.AVG, group=self._route.replica)
        return [scattered, PendingSignatures([self._got])]


def _whole_size(parameter: torch.Tensor, route: Route) -> int:
    """Elements of a gathered parameter, or somewhat more: tensor parallelism may cut unevenly."""
    sizes = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if axis != route.dimension and isinstance(placement, Shard):
                sizes[placement.dim] = math.ceil(sizes[placement.dim] / parameter.device_mesh.size(axis))
    return math.prod(sizes)
