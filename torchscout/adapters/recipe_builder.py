"""Builds the recipes of a job from what its adapter says (paper, section 6)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch

from torchscout.adapters.base import Adapter
from torchscout.adapters.modules import stages_of
from torchscout.adapters.structure import Part, Structure, plain_name, without_experts
from torchscout.config import ReplayConfig
from torchscout.decision.types import Surface
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
from torchscout.replay.recipes.replicated_state import ReplicatedStateRecipe
from torchscout.replay.recipes.working_copies import CopyWatch
from torchscout.replay.replayer import PeersFor
from torchscout.replay.sharded_parameters import ParameterGatherers, route_of
from torchscout.state.table import Row, StateTable, row_of

__all__ = [
    "RecipeBuilder",
    "are_experts_spread",
    "device_of_job",
    "expert_parameters",
    "keep_common",
    "table_of",
]

_Parameters = Mapping[Surface, torch.Tensor]


def table_of(adapter: Adapter) -> StateTable:
    """Return the table of everything that the adapter names. Call it after ``adapter.mesh``."""
    # A shard may have the name of its parameter, which then has no memory of its own between steps.
    named = {
        **adapter.parameters(),
        **adapter.owned_state(),
        **adapter.owned_state(LayerKind.EXPERT),
    }
    return StateTable(
        named,
        adapter.optimizers(),
        modules=lambda: [(plain_name(path) or "model", each) for path, each in adapter.model.named_modules()],
    )


def are_experts_spread(mesh: Mesh) -> bool:
    """Whether ranks hold different experts, so that a layer is not the same work on all its dense peers."""
    return mesh.degree("expert", LayerKind.EXPERT) > 1


def expert_parameters(adapter: Adapter, experts: Sequence[Part]) -> dict[Surface, torch.Tensor]:
    """The parameters of experts, and the copies that are named after them."""
    own, every = {id(each) for part in experts for each in part.module.parameters()}, adapter.parameters()
    surfaces = {surface for surface, each in every.items() if id(each) in own}
    return {name: each for name, each in every.items() if {name, name.rpartition(".")[0]} & surfaces}


def device_of_job(adapter: Adapter) -> torch.device:
    """The device on which this rank computes."""
    return next((each.device for each in adapter.parameters().values()), torch.device("cpu"))


class RecipeBuilder:
    """Builds the recipes of one rank."""

    def __init__(
        self,
        adapter: Adapter,
        table: StateTable,
        config: ReplayConfig,
        mesh: Mesh,
        rank: int,
        exchange: JobExchange,
    ) -> None:
        """``table`` has the adapter's state; see ``table_of``."""
        self._adapter, self._table, self._config = adapter, table, config
        self._mesh, self._rank, self._exchange = mesh, rank, exchange
        self._updating: list[OptimizerRecipe] = []
        self._places: dict[tuple[str, ...], frozenset[int]] = {}
        self.device, self._optimizers = device_of_job(adapter), adapter.optimizers()
        self._compiled = CompiledCode(adapter.model, self.device)
        self._refusal = disturbed_by_cudnn(adapter.model)
        """Why nothing is repeated, neither layers nor updates."""
        self._layer_refusal = self._refusal or adapter.layer_obstacle
        self._surfaces: dict[torch.Tensor, Surface] = _inverted(adapter.parameters())

    def recipes(
        self,
        structure: Structure | None,
        experts: Sequence[Part],
        shapes: Mapping[str, Sequence[Rows]] | None,
    ) -> list[Recipe]:
        """Return every recipe that the configuration asks for.

        Peers along the mesh's replica axis hold copies of the same state, along its shard axis each has its
        own. ``structure`` is None if no other rank does the same work: then state is watched, and transfers
        are tested. ``shapes`` are those of a catalog, by the name of the experts; None without a catalog.
        """
        groups = ProcessGroupRecipe(self._exchange, self.device)
        if structure is None:
            adapter = self._adapter
            every = {**adapter.parameters(), **adapter.owned_state()}
            recipes = [self._watched("replicated_state", every), groups]
        else:
            recipes = [*self._dense(structure, experts), groups, *self._sparse(experts, shapes)]
        return [recipe for recipe in recipes if recipe.kind in self._config.intervals]

    def _dense(self, structure: Structure, experts: Sequence[Part]) -> list[Recipe]:
        """The recipes of everything but experts that are spread over ranks."""
        adapter, is_spread = self._adapter, are_experts_spread(self._mesh)
        of_experts = expert_parameters(adapter, experts) if is_spread else {}
        left_out = {*adapter.unreplicated_parameters(), *of_experts}
        shared = {surface: each for surface, each in adapter.parameters().items() if surface not in left_out}
        layers = without_experts(structure.layers, experts) if is_spread else structure.layers
        owned, is_sharded = adapter.owned_state(), self._is_owned(LayerKind.DENSE)
        state = {**shared, **owned} if is_sharded else {name: shared[name] for name in shared.keys() - owned}
        recipes = [
            self._state("replicated_state", state, LayerKind.DENSE),
            self._modules("embedding", structure.embeddings),
            self._modules("layer", layers),
            self._modules("output", structure.outputs),
            self._updates("optimizer", owned or shared, LayerKind.DENSE, owned=bool(owned)),
        ]
        if not is_sharded:
            owned_experts = adapter.owned_state(LayerKind.EXPERT) if is_spread else {}
            recipes.append(self._owned_state({**owned, **owned_experts}, {**shared, **of_experts}))
        return recipes

    def _sparse(
        self, experts: Sequence[Part], shapes: Mapping[str, Sequence[Rows]] | None
    ) -> Iterator[Recipe]:
        """The recipes of experts, where each has a copy on another rank."""
        mesh = self._mesh
        is_spread = are_experts_spread(mesh)
        if not all(group.can_compare for group in mesh.peer_groups(LayerKind.EXPERT)):
            return
        if is_spread or shapes is not None:
            gatherers = partial(self._gatherers, role=LayerKind.EXPERT, reduces=False)
            recipe = ExpertsRecipe(
                _named(experts), shapes or {}, self._surfaces, self.device, gatherers, self._compiled
            )
            if self._layer_refusal is not None:
                recipe.refuse(self._layer_refusal)
            yield recipe
        if is_spread:
            own, owned = (
                expert_parameters(self._adapter, experts),
                self._adapter.owned_state(LayerKind.EXPERT),
            )
            yield self._state("expert_state", own, LayerKind.EXPERT)
            yield self._updates("expert_optimizer", owned or own, LayerKind.EXPERT, owned=bool(owned))
            yield AllToAllRecipe(mesh.ranks_along("expert", self._rank, LayerKind.EXPERT), self.device)

    def _state(self, kind: str, parameters: _Parameters, role: LayerKind) -> Recipe:
        """Parameters and their optimizer slots: compared with copies, or watched where there are none."""
        if self._is_owned(role):
            return self._watched(kind, parameters, role)
        return ReplicatedStateRecipe(self._table.compare(parameters), kind, role)

    def _watched(self, kind: str, parameters: _Parameters, role: LayerKind = LayerKind.DENSE) -> Recipe:
        """Parameters and their optimizer slots, watched between updates."""
        view = self._table.own(parameters)
        # A recipe for experts does not watch the rest of the model again.
        copies = self._copies() if role is LayerKind.DENSE else None
        return OwnedStateRecipe(
            lambda: view.rows,
            self._optimizers,
            kind,
            role,
            budget=self._config.watch_budget,
            copies=copies,
            padding=self._adapter.padding,
        )

    def _owned_state(self, owned: _Parameters, shared: _Parameters) -> Recipe:
        """State that only this rank holds: ``owned`` according to the adapter, or learned to be."""
        table, ownership = self._table, self._table.ownership
        own, others = table.own(owned), table.view({*shared} - {*owned})

        def state() -> dict[Surface, Row]:
            found = {**own.rows}
            # A replica with a corrupted copy would pass it on to all, and then all copies would agree.
            gathered = {name: each for recipe in self._updating for name, each in recipe.gathered().items()}
            found |= {name: row_of(name, each) for name, each in gathered.items()}
            if ownership.owned:
                found |= {name: row for name, row in others.rows.items() if name in ownership.owned}
            return found

        return OwnedStateRecipe(
            state,
            self._optimizers,
            "owned_state",
            budget=self._config.watch_budget,
            is_learned=lambda: bool(
                owned
                or ownership.owned
                or any(each.gathered() for each in self._updating)
                or self._adapter.working_copies().resting
            ),
            copies=self._copies(),
            padding=self._adapter.padding,
        )

    def _copies(self) -> CopyWatch:
        return CopyWatch(self._adapter.working_copies, stages_of(self._adapter.model))

    def _updates(self, kind: str, parameters: _Parameters, role: LayerKind, *, owned: bool) -> Recipe:
        is_owned = owned or self._is_owned(role)
        recipe = OptimizerRecipe(
            parameters, self._optimizers, self.device, owned=is_owned, kind=kind, role=role
        )
        recipe.is_owned = self._table.ownership.is_owned
        for each in recipe.communication.values():
            each.expect(self._alike(role, "replica", "shard", "pipeline"))
            each.refusal = self._refusal
        self._updating.append(recipe)
        return recipe

    def _modules(self, kind: str, parts: Sequence[Part]) -> Recipe:
        gatherers = partial(self._gatherers, role=LayerKind.DENSE, reduces=kind == "layer")
        recipe = LayerRecipe(
            kind, _named(parts), self._surfaces, self.device, gatherers, compiled=self._compiled
        )
        recipe.is_owned = self._table.ownership.is_owned
        if self._layer_refusal is not None:
            recipe.refuse(self._layer_refusal)
        return recipe

    def _gatherers(self, module: torch.nn.Module, *, role: LayerKind, reduces: bool) -> ParameterGatherers:
        found, mesh, rank = self._adapter.gatherers(module), self._mesh, self._rank
        is_mixed = mesh.layer_peers_of(rank, role) != mesh.peers_of(rank, role)
        # A router may communicate with the ranks that its experts are spread over.
        routed = frozenset(mesh.ranks_along("expert", rank, LayerKind.EXPERT))
        return replace(
            found,
            copies=not (is_mixed or self._is_owned(role)),
            is_mixed=is_mixed,
            route=route_of([*module.parameters()], mesh, rank, role) if reduces and found.modules else None,
            together=self._alike(role, "replica", "shard", "pipeline") | routed,
            # Shards may be spread over context parallelism too.
            kept_among=self._alike(role, "pipeline") if found.modules else found.kept_among,
        )

    def _alike(self, role: LayerKind, *axes: str) -> frozenset[int]:
        """The ranks that have the same coordinates as this one along these axes."""
        mesh, key = self._mesh, (role, *axes)
        if key not in self._places:
            place = attrgetter(*axes)
            own = place(mesh.address_of(self._rank, role))
            self._places[key] = frozenset(
                each for each in range(len(mesh)) if place(mesh.address_of(each, role)) == own
            )
        return self._places[key]

    def _is_owned(self, role: LayerKind) -> bool:
        """Whether each rank is the only one to hold its part."""
        return self._mesh.peer_axis(role) is Axis.SHARD


def _inverted(parameters: _Parameters) -> dict[torch.Tensor, Surface]:
    return {each: surface for surface, each in parameters.items()}


def _named(parts: Sequence[Part]) -> dict[str, torch.nn.Module]:
    return {part.name: part.module for part in parts}


def keep_common(recipes: Sequence[Recipe], peers: PeersFor) -> None:
    """Leave out targets that only some peers have: peers replay the same target at the same time.

    Every rank makes this call.
    """
    for recipe in recipes:
        if not isinstance(recipe, LayerRecipe | OptimizerRecipe) or isinstance(recipe, ExpertsRecipe):
            continue  # shapes of experts come from a catalog that is the same everywhere
        channel = peers(recipe.role, recipe.is_gathered).metadata
        names = [json.loads(each) for each in channel.gather(json.dumps(recipe.targets).encode())]
        if any(each != names[0] for each in names):
            common = set.intersection(*map(set, names))
            recipe.keep([each for each in names[0] if each in common])
