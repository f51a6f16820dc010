"""Plain PyTorch: DDP, FSDP2, or whatever the user describes (paper, section 9)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchscout.config import Parallelism
from torchscout.decision.record import Surface
from torchscout.evidence.replay.sharded import Keepers, keepers_of
from torchscout.integration.parallelism import mesh_from
from torchscout.integration.structure import Structure, layers_of, structure_of, surface_of
from torchscout.mesh import Mesh

__all__ = ["PyTorchAdapter"]


class PyTorchAdapter:
    """A model and its optimizers, as PyTorch knows them."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        parallelism: Mesh | DeviceMesh | Parallelism | None,
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._parallelism = parallelism

    def mesh(self, hosts: Sequence[str]) -> Mesh:
        world = dist.get_world_size()
        return mesh_from(self._parallelism or self._guessed(world), world, hosts, _divided(self._model))

    def layers(self) -> Sequence[torch.nn.Module]:
        return [layer.module for layer in layers_of(self._model)]

    def structure(
        self,
        *,
        embedding: str | None = None,
        layers: str | Sequence[str] | None = None,
        output: str | None = None,
    ) -> Structure:
        return structure_of(self._model, embedding=embedding, layers=layers, output=output)

    def parameters(self) -> Mapping[Surface, torch.nn.Parameter]:
        return {surface_of(name): parameter for name, parameter in self._model.named_parameters()}

    def keepers(self, module: torch.nn.Module) -> Keepers:
        return keepers_of(self._model, module)

    def unreplicated(self) -> Collection[Surface]:
        if not isinstance(self._model, DistributedDataParallel):
            return ()
        return {surface_of(name) for name in self._model.parameters_to_ignore}

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    def _guessed(self, world: int) -> Parallelism | Mesh:
        """What the wrapped model says by itself. That all ranks are peers is never assumed."""
        if world == 1:
            return Parallelism()
        if isinstance(self._model, DistributedDataParallel):
            if self._model.process_group.size() == world:
                return Parallelism(replica=world)
        elif isinstance(self._model, FSDPModule):
            found = {p.device_mesh for p in self._model.parameters() if isinstance(p, DTensor)}
            shapes = {mesh.shape for mesh in found if mesh.size() == world}
            if len(found) == len(shapes) == 1:
                (shape,) = shapes
                if len(shape) == 1:
                    return Parallelism(shard=world)
                if len(shape) == 2 and _is_hybrid(self._model):
                    return Parallelism(replica=shape[0], shard=shape[1])
        raise ValueError(
            f"which of the {world} ranks do the same work cannot be read off a {type(self._model).__name__}; "
            "pass parallelism=, such as Parallelism(replica=4, tensor=2) or a DeviceMesh with named axes"
        )


def _divided(model: torch.nn.Module) -> set[str]:
    """The mesh axes along which ranks hold different parts of a parameter."""
    return {
        name
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
        for name, placement in zip(
            parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False
        )
        if not placement.is_replicate()
    }


def _is_hybrid(model: torch.nn.Module) -> bool:
    """Whether parameters are copied along the first axis of their mesh and sharded along the second."""
    placements = {p.placements for p in model.parameters() if isinstance(p, DTensor)}
    return all(len(each) == 2 and each[0].is_replicate() and each[1].is_shard() for each in placements)
