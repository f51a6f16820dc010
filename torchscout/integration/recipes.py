"""From what an adapter tells about a job to what replay does with it (paper, section 6.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from torchscout.config import ReplayConfig
from torchscout.decision.record import Surface
from torchscout.evidence.replay.at_rest import AtRestRecipe
from torchscout.evidence.replay.census import CensusRecipe, slots_of
from torchscout.evidence.replay.layer import LayerRecipe
from torchscout.evidence.replay.optimizer_step import OptimizerRecipe
from torchscout.evidence.replay.recipe import Recipe
from torchscout.evidence.replay.reduction import route_of
from torchscout.evidence.replay.sharded import Keepers
from torchscout.integration.adapter import Adapter
from torchscout.integration.structure import Part
from torchscout.mesh import Axis, Mesh

__all__ = ["device_of_job", "recipes_for"]


def recipes_for(
    adapter: Adapter, config: ReplayConfig, mesh: Mesh | None = None, rank: int = 0
) -> list[Recipe]:
    """Every recipe the configuration asks for; a ``ValueError`` says what a user must name.

    Peers along the mesh's replica axis hold copies of each other's state, along its shard axis each its own.
    Without a mesh nothing is known of shards.
    """
    structure = adapter.structure(embedding=config.embedding, layers=config.layers, output=config.output)
    parameters, optimizers = dict(adapter.parameters()), adapter.optimizers()
    device = device_of_job(adapter)
    is_owned = mesh is not None and mesh.peer_axis() is Axis.SHARD
    is_mixed = mesh is not None and mesh.layer_peers_of(rank) != mesh.peers_of(rank)
    surfaces: dict[torch.Tensor, Surface] = {each: surface for surface, each in parameters.items()}
    copies = {surface: each for surface, each in parameters.items() if surface not in adapter.unreplicated()}

    def layers(kind: str, parts: Sequence[Part]) -> LayerRecipe:
        modules = {part.name: part.module for part in parts}

        def keepers(module: torch.nn.Module) -> Keepers:
            found, route = adapter.keepers(module), None
            if mesh is not None and kind == "layer" and found.modules:
                route = route_of([*module.parameters()], mesh, rank)
            copies = not (is_mixed or is_owned)
            return replace(found, copies=copies, is_mixed=is_mixed, route=route)

        return LayerRecipe(kind, modules, surfaces, device, keepers)

    def slots() -> Mapping[Surface, torch.Tensor]:
        return slots_of({each: surface for surface, each in copies.items()}, optimizers)

    def state() -> Mapping[str, Mapping[Surface, torch.Tensor]]:
        return {"parameters": copies, "optimizer": slots()}

    recipes: list[Recipe] = [
        AtRestRecipe(lambda: {**copies, **slots()}, optimizers) if is_owned else CensusRecipe(state),
        layers("embedding", structure.embeddings),
        layers("layer", structure.layers),
        layers("output", structure.outputs),
        OptimizerRecipe(copies, optimizers, device, owned=is_owned),
    ]
    return [recipe for recipe in recipes if recipe.kind in config.intervals]


def device_of_job(adapter: Adapter) -> torch.device:
    """Where this rank computes."""
    return next((each.device for each in adapter.parameters().values()), torch.device("cpu"))
