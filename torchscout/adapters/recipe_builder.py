"""From what an adapter tells about a job to what replay does with it (paper, section 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch

from torchscout.adapters.base import Adapter
from torchscout.adapters.modules import stages_of
from torchscout.adapters.structure import Part, without_experts
from torchscout.config import ReplayConfig
from torchscout.decision.ownership import Ownership
from torchscout.decision.record import Surface
from torchscout.experts.coverage import Rows
from torchscout.mesh import Axis, LayerKind, Mesh
from torchscout.replay.capture.context import disturbed_by_cudnn
from torchscout.replay.compiled import CompiledCode
from torchscout.replay.recipe import JobExchange, Recipe
from torchscout.replay.recipes.all_to_all import AllToAllRecipe
from torchscout.replay.recipes.experts import ExpertsRecipe
from torchscout.replay.recipes.layer import LayerRecipe
from torchscout.replay.recipes.optimizer import OptimizerRecipe
from torchscout.replay.recipes.owned_state import OwnedStateRecipe
from torchscout.replay.recipes.process_groups import ProcessGroupRecipe
from torchscout.replay.recipes.replicated_state import ReplicatedStateRecipe, slots_of
from torchscout.replay.recipes.working_copies import WorkingCopies
from torchscout.replay.sharded_parameters import ParameterGatherers, route_of

__all__ = ["are_experts_spread", "device_of_job", "expert_parameters", "recipes_for"]

_Parameters = Mapping[Surface, torch.Tensor]


def recipes_for(
    adapter: Adapter,
    config: ReplayConfig,
    mesh: Mesh | None = None,
    rank: int = 0,
    shapes: Mapping[str, Sequence[Rows]] | None = None,
    everybody: JobExchange | None = None,
    *,
    is_alone: bool = False,
) -> list[Recipe]:
    """Every recipe the configuration asks for; a ``ValueError`` says what a user must name.

    Peers along the mesh's replica axis hold copies of each other's state, along its shard axis each its own.
    Without a mesh nothing is known of shards, or of experts. ``shapes`` are those of a catalog, by the name
    of the experts; None where there is none. Without ``everybody`` nobody agrees on what is sent. If this
    rank ``is_alone``, no other rank does the same work: then state is watched, and transfers are tested.
    """
    if is_alone:
        return _recipes_alone(adapter, config, _Job(adapter, mesh, rank, config.watch_budget), everybody)
    structure = adapter.structure(embedding=config.embedding, layers=config.layers, output=config.output)
    experts = adapter.experts(config.experts)
    is_spread = mesh is not None and are_experts_spread(mesh)
    job = _Job(adapter, mesh, rank, config.watch_budget)
    own = expert_parameters(adapter, experts) if is_spread else {}
    left_out = {*adapter.unreplicated(), *own}
    shared = {surface: each for surface, each in adapter.parameters().items() if surface not in left_out}
    layers = without_experts(structure.layers, experts) if is_spread else structure.layers
    owned, owned_of_experts = adapter.owned(), adapter.owned(LayerKind.EXPERT) if is_spread else {}
    is_sharded = job.is_owned(LayerKind.DENSE)
    recipes: list[Recipe] = [
        job.state("census", {**shared, **owned} if is_sharded else shared, LayerKind.DENSE),
        job.modules("embedding", structure.embeddings),
        job.modules("layer", layers),
        job.modules("output", structure.outputs),
        job.updates("optimizer", owned or shared, LayerKind.DENSE, owned=bool(owned)),
    ]
    if not is_sharded:
        recipes.append(job.at_rest("at_rest", {**owned, **owned_of_experts}, {**shared, **own}))
    if everybody is not None:
        recipes.append(ProcessGroupRecipe(everybody, device_of_job(adapter)))
    if mesh is not None and _have_peers(mesh):
        if is_spread or shapes is not None:
            recipes.append(job.experts(experts, shapes or {}))
        if is_spread:
            members = mesh.ranks_along("expert", rank, LayerKind.EXPERT)
            recipes += [
                job.state("expert_census", own, LayerKind.EXPERT),
                job.updates(
                    "expert_optimizer",
                    owned_of_experts or own,
                    LayerKind.EXPERT,
                    owned=bool(owned_of_experts),
                ),
                AllToAllRecipe(members, device_of_job(adapter)),
            ]
    return [recipe for recipe in recipes if recipe.kind in config.intervals]


def _recipes_alone(
    adapter: Adapter, config: ReplayConfig, job: _Job, everybody: JobExchange | None
) -> list[Recipe]:
    recipes: list[Recipe] = [job.watched("census", {**adapter.parameters(), **adapter.owned()})]
    if everybody is not None:
        recipes.append(ProcessGroupRecipe(everybody, job.device))
    return [recipe for recipe in recipes if recipe.kind in config.intervals]


def are_experts_spread(mesh: Mesh) -> bool:
    """Whether ranks hold different experts: then a layer is not the same work on all its dense peers."""
    return mesh.degree("expert", LayerKind.EXPERT) > 1


def expert_parameters(adapter: Adapter, experts: Sequence[Part]) -> dict[Surface, torch.Tensor]:
    """What only ranks with the same experts have in common, and what is named after it."""
    own, every = {id(each) for part in experts for each in part.module.parameters()}, adapter.parameters()
    surfaces = {surface for surface, each in every.items() if id(each) in own}
    return {name: each for name, each in every.items() if {name, name.rpartition(".")[0]} & surfaces}


def device_of_job(adapter: Adapter) -> torch.device:
    """Where this rank computes."""
    return next((each.device for each in adapter.parameters().values()), torch.device("cpu"))


class _Job:
    """What all recipes of a rank are made from."""

    def __init__(self, adapter: Adapter, mesh: Mesh | None, rank: int, budget: float | None = None) -> None:
        self._adapter, self._mesh, self._rank, self._budget = adapter, mesh, rank, budget
        self.ownership = Ownership()
        self._updating: list[OptimizerRecipe] = []
        self._places: dict[tuple[str, ...], frozenset[int]] = {}
        self.device, self._optimizers = device_of_job(adapter), adapter.optimizers()
        self._compiled = CompiledCode(adapter.model, self.device)
        self._refusal = disturbed_by_cudnn(adapter.model)
        self._surfaces: dict[torch.Tensor, Surface] = {
            each: surface for surface, each in adapter.parameters().items()
        }

    def state(self, kind: str, parameters: _Parameters, role: LayerKind) -> Recipe:
        """All that is held: compared with copies, or watched where there are none."""
        if self.is_owned(role):
            return self.watched(kind, parameters, role)
        surfaces = {each: surface for surface, each in parameters.items()}

        def state() -> dict[str, Mapping[Surface, torch.Tensor]]:
            return {"parameters": parameters, "optimizer": slots_of(surfaces, self._optimizers)}

        return ReplicatedStateRecipe(state, kind, role, self.ownership)

    def watched(self, kind: str, parameters: _Parameters, role: LayerKind = LayerKind.DENSE) -> Recipe:
        """These parameters and their slots, watched between updates."""
        surfaces = {each: surface for surface, each in parameters.items()}

        def state() -> dict[Surface, torch.Tensor]:
            return {**parameters, **slots_of(surfaces, self._optimizers)}

        # A recipe for experts does not watch the rest of the model again.
        copies = self._adapter.working_copies if role is LayerKind.DENSE else WorkingCopies
        return OwnedStateRecipe(
            state,
            self._optimizers,
            kind,
            role,
            budget=self._budget,
            copies=copies,
            passes=stages_of(self._adapter.model),
        )

    def at_rest(self, kind: str, owned: _Parameters, shared: _Parameters) -> Recipe:
        """What one rank alone holds: ``owned`` by its framework's word, or found out to be of the rest."""
        surfaces = {each: surface for surface, each in owned.items()}
        others = {each: surface for surface, each in shared.items()}

        def state() -> dict[Surface, torch.Tensor]:
            found = {**owned, **slots_of(surfaces, self._optimizers)}
            # A replica whose copy is wrong would hand it on to all, in whose eyes it is right then.
            found |= {name: each for recipe in self._updating for name, each in recipe.gathered().items()}
            if learned := self.ownership.owned:
                every = {**shared, **slots_of(others, self._optimizers)}
                found |= {name: each for name, each in every.items() if name in learned}
            return found

        return OwnedStateRecipe(
            state,
            self._optimizers,
            kind,
            budget=self._budget,
            is_learned=lambda: bool(
                owned
                or self.ownership.owned
                or any(each.gathered() for each in self._updating)
                or self._adapter.working_copies().resting
            ),
            copies=self._adapter.working_copies,
            passes=stages_of(self._adapter.model),
        )

    def updates(self, kind: str, parameters: _Parameters, role: LayerKind, *, owned: bool = False) -> Recipe:
        is_owned = owned or self.is_owned(role)
        recipe = OptimizerRecipe(
            parameters, self._optimizers, self.device, owned=is_owned, kind=kind, role=role
        )
        recipe.is_owned = self.ownership.is_owned
        for each in recipe.communication.values():
            each.expect(self._alike(role, "replica", "shard", "pipeline"))
            each.refusal = self._refusal
        self._updating.append(recipe)
        return recipe

    def modules(self, kind: str, parts: Sequence[Part]) -> Recipe:
        gatherers = partial(self._keepers, role=LayerKind.DENSE, reduces=kind == "layer")
        recipe = LayerRecipe(
            kind, _named(parts), self._surfaces, self.device, gatherers, compiled=self._compiled
        )
        recipe.is_owned = self.ownership.is_owned
        if self._refusal is not None:
            recipe.refuse(self._refusal)
        return recipe

    def experts(self, parts: Sequence[Part], shapes: Mapping[str, Sequence[Rows]]) -> Recipe:
        gatherers = partial(self._keepers, role=LayerKind.EXPERT, reduces=False)
        return ExpertsRecipe(_named(parts), shapes, self._surfaces, self.device, gatherers, self._compiled)

    def _keepers(self, module: torch.nn.Module, *, role: LayerKind, reduces: bool) -> ParameterGatherers:
        found, mesh, rank = self._adapter.gatherers(module), self._mesh, self._rank
        if mesh is None:
            return found
        is_mixed = mesh.layer_peers_of(rank, role) != mesh.peers_of(rank, role)
        route = route_of([*module.parameters()], mesh, rank, role) if reduces and found.modules else None
        copies = not (is_mixed or self.is_owned(role))
        # A router may communicate with the ranks that its experts are spread over.
        routed = frozenset(mesh.ranks_along("expert", rank, LayerKind.EXPERT))
        together = self._alike(role, "replica", "shard", "pipeline") | routed
        # Shards may be spread over context parallelism too.
        kept_among = self._alike(role, "pipeline") if found.modules else found.kept_among
        return replace(
            found, copies=copies, is_mixed=is_mixed, route=route, together=together, kept_among=kept_among
        )

    def _alike(self, role: LayerKind, *axes: str) -> frozenset[int]:
        """The ranks that have this one's place along these axes."""
        mesh, key = self._mesh, (role, *axes)
        if mesh is not None and key not in self._places:
            place = attrgetter(*axes)
            own = place(mesh.address_of(self._rank, role))
            self._places[key] = frozenset(
                each for each in range(len(mesh)) if place(mesh.address_of(each, role)) == own
            )
        return self._places.get(key, frozenset())

    def is_owned(self, role: LayerKind) -> bool:
        """Whether each rank is the only one to hold its part."""
        return self._mesh is not None and self._mesh.peer_axis(role) is Axis.SHARD


def _have_peers(mesh: Mesh) -> bool:
    """Whether everybody's experts are on another rank too."""
    return all(group.can_compare for group in mesh.peer_groups(LayerKind.EXPERT))


def _named(parts: Sequence[Part]) -> dict[str, torch.nn.Module]:
    return {part.name: part.module for part in parts}
