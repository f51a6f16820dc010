"""Megatron-Core: its parallel state, model chunks and optimizers (paper, section 9).

Imported only if a job has imported Megatron-Core. A job with an ``obstacle`` is not replayed; its hangs are
still localized.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    TorchFullyShardedDataParallel,
)
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchscout.adapters.base import UpdateHooks, mesh_from, overwritten
from torchscout.adapters.megatron.fsdp import Gatherer, copies_of, obstacle_of, scatter, show_shards
from torchscout.adapters.megatron.gather import LATE, gathered_among, gathers_late, own_parts, ungathered
from torchscout.adapters.megatron.surroundings import Losses, Streams, lent
from torchscout.adapters.modules import is_matrix, is_table
from torchscout.adapters.structure import (
    Part,
    Structure,
    experts_of,
    layers_of,
    plain_name,
    structure_of,
    surface_of,
)
from torchscout.adapters.versions import Uses, require
from torchscout.config import Parallelism
from torchscout.decision.progress import Phase
from torchscout.decision.types import Surface
from torchscout.mesh import LayerKind, Mesh, MeshAddress
from torchscout.replay.capture.context import register_tracker
from torchscout.replay.recipes.working_copies import WorkingCopies
from torchscout.replay.sharded_parameters import ParameterGatherers

if TYPE_CHECKING:
    from torchscout.state.collect import Stateful

__all__ = ["MegatronAdapter", "adapter_of"]

_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, TorchFullyShardedDataParallel)
_USES: Uses = {
    "megatron.core.distributed.DistributedDataParallel.start_param_sync": ("force_sync",),
    "megatron.core.distributed.DistributedDataParallelConfig": (
        "overlap_param_gather",
        "use_distributed_optimizer",
    ),
    **{
        f"megatron.core.parallel_state.get_{name}_rank": ()
        for name in (
            "context_parallel",
            "data_parallel",
            "expert_data_parallel",
            "expert_model_parallel",
            "expert_tensor_parallel",
            "pipeline_model_parallel",
            "tensor_model_parallel",
        )
    },
}
_KNOWN = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)


def adapter_of(
    model: Any, optimizer: Any, parallelism: Mesh | DeviceMesh | Parallelism | None
) -> MegatronAdapter | None:
    """Return the adapter if Megatron-Core wraps every model chunk, or has the optimizer."""
    chunks = [*model] if isinstance(model, list | tuple | torch.nn.ModuleList) else [model]
    is_wrapped = bool(chunks) and all(isinstance(each, _WRAPPERS) for each in chunks)
    if not (is_wrapped or isinstance(optimizer, MegatronOptimizer)):
        return None
    if wrong := [type(each).__name__ for each in chunks if not isinstance(each, torch.nn.Module)]:
        raise ValueError(f"model must be Megatron's model chunk, or a list of them, got {', '.join(wrong)}")
    if optimizer is not None and not isinstance(optimizer, MegatronOptimizer):
        raise ValueError(f"optimizer must come from get_megatron_optimizer, got {type(optimizer).__name__}")
    members = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    attributes = [
        (each, name) for each in chunks if is_wrapped for name in ("config", "ddp_config", "module")
    ]
    attributes += [(each, name) for each in members if each for name in ("is_stub_optimizer", "optimizer")]
    require("megatron-core", megatron.core.__version__, _USES, attributes)
    return MegatronAdapter(chunks, optimizer, parallelism)


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of one rank, as all ranks exchange it."""

    dense: MeshAddress
    expert: MeshAddress
    shards: Mapping[str, int]
    """How many shards only this rank updates, by optimizer and group."""


class MegatronAdapter:
    """The model chunks of one rank and their optimizer."""

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: MegatronOptimizer | None,
        parallelism: Mesh | DeviceMesh | Parallelism | None = None,
    ) -> None:
        self._chunks, self._optimizer, self._parallelism = tuple(chunks), optimizer, parallelism
        self._updates = UpdateHooks(optimizer, lambda: register_tracker("megatron", Streams()))
        self._places: Sequence[_Place] = ()
        self._copies: Mapping[Surface, torch.Tensor] | None = None
        self._model = self._chunks[0] if len(self._chunks) == 1 else torch.nn.ModuleList(self._chunks)

    @property
    def model(self) -> torch.nn.Module:
        return self._model

    @property
    def obstacle(self) -> str | None:
        for chunk in self._chunks:
            if not isinstance(chunk, DistributedDataParallel | FullyShardedDataParallel):
                return f"Megatron's {type(chunk).__name__} is not supported; its DistributedDataParallel is"
            if isinstance(chunk, FullyShardedDataParallel) and (why := obstacle_of(chunk)):
                return f"Megatron-FSDP is not supported {why}"
        if other := [each for each in _members(self._optimizer) if type(each) not in _KNOWN]:
            known = ", ".join(each.__name__ for each in _KNOWN)
            return f"Megatron's {type(other[0]).__name__} is not supported; supported are {known}"
        return None

    @property
    def layer_obstacle(self) -> str | None:
        return next(filter(None, map(_layer_obstacle, self._chunks)), None)

    def mesh(self, hosts: Sequence[str]) -> Mesh:
        shards = {place: len(each) for role in LayerKind for place, each in self._shards(role).items()}
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, _Place(self._dense_address(), self._expert_address(), shards))
        self._places = places
        if self._parallelism is not None:
            return mesh_from(self._parallelism, len(places), hosts)
        has_experts = any(getattr(chunk.config, "num_moe_experts", None) for chunk in self._chunks)
        expert = [each.expert for each in places] if has_experts else None
        return Mesh([each.dense for each in places], hosts, expert_addresses=expert)

    def layers(self) -> Sequence[torch.nn.Module]:
        return [layer.module for layer in self._layers() or layers_of(self._model)]

    def structure(
        self,
        *,
        embedding: str | None = None,
        layers: str | Sequence[str] | None = None,
        output: str | None = None,
    ) -> Structure:
        own = self._layers()
        if not own or embedding is not None or layers is not None or output is not None:
            return structure_of(self._model, embedding=embedding, layers=layers, output=output)
        inside = {id(each) for layer in own for each in layer.module.modules()}
        outside = [each for each in self._parts() if id(each.module) not in inside]
        return Structure(
            tuple(each for each in outside if is_table(each.module)),
            own,
            tuple(each for each in outside if each.name.endswith("output_layer") and is_matrix(each.module)),
        )

    def experts(self, named: str | Sequence[str] | None = None) -> Sequence[Part]:
        if named is not None:
            return experts_of(self._model, named)
        every = self._parts()
        mixtures = [each.module.experts for each in every if isinstance(each.module, BaseMoELayer)]
        # The experts of a list are called one by one, a stack of them at once.
        called = {id(each) for of in mixtures for each in getattr(of, "local_experts", [of])}
        return [each for each in every if id(each.module) in called]

    def parameters(self) -> Mapping[Surface, torch.Tensor]:
        self._show_shards()
        found: dict[Surface, torch.Tensor] = {}
        for name, parameter in self._model.named_parameters():
            found[surface_of(name)] = parameter
            copy = getattr(parameter, "main_param", None)
            if copy is not None and not getattr(parameter, "main_param_sharded", False):
                found[f"{surface_of(name)}.main"] = copy
        return found

    def gatherers(self, module: torch.nn.Module) -> ParameterGatherers:
        chunks = [each for each in self._sharded() if any(part is module for part in each.modules())]
        among = (gathered_among(each) for each in self._chunks if gathers_late(each))
        return ParameterGatherers(
            tuple(Gatherer(each, module) for each in chunks),
            around=lambda: lent(module),
            kept_among=frozenset().union(*among),
        )

    def unreplicated_parameters(self) -> Collection[Surface]:
        return ()

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [each.optimizer for each in _members(self._optimizer)]

    def owned_state(self, role: LayerKind = LayerKind.DENSE) -> Mapping[Surface, torch.Tensor]:
        """Ranks have different numbers of shards in a group: one with fewer repeats its own. If a peer has
        none to update, the group is only watched between updates."""
        found: dict[Surface, torch.Tensor] = {}
        for place, shards in self._shards(role).items():
            counts = [each.shards.get(place, 0) for each in self._peers(role)] or [len(shards)]
            seen = shards if min(counts) else [each.detach() for each in shards]
            many = max(counts) if min(counts) else len(shards)
            found |= {f"optimizer.{place}/shard.{number}": seen[number % len(seen)] for number in range(many)}
        return found if role is LayerKind.EXPERT else found | copies_of(self._sharded())

    def padding(self) -> Mapping[Surface, Sequence[range]]:
        return {}

    def working_copies(self) -> WorkingCopies:
        """Parameters that the forward pass gathers are watched from then on; this rank's contribution to
        that gather, from the update on."""
        if self._sharded():
            return WorkingCopies()
        if self._copies is None:
            self._copies = overwritten(self._model, self.optimizers())
        late = [each for each in self._chunks if gathers_late(each)]
        missing = {id(each) for chunk in late for each in ungathered(chunk)}
        unwatched = {name: LATE for name, each in self._copies.items() if id(each) in missing}
        resting = {name: each for name, each in self._copies.items() if name not in unwatched}
        return WorkingCopies({**resting, **own_parts(late)}, unwatched)

    def hook_updates(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Hook the outermost ``step``, because parameters are copied and gathered after the inner optimizers
        have stepped. An update that is skipped, for a gradient that is not finite, ends a step too."""

        def updated() -> None:
            self._show_shards()
            after()

        return self._updates.add(before, updated)

    def finish_update(self) -> None:
        """Gather parameters that would be gathered in the next forward pass."""
        for chunk in self._chunks:
            if isinstance(chunk, FullyShardedDataParallel):
                scatter(chunk)
            elif gathers_late(chunk):
                chunk.start_param_sync(force_sync=True)

    def extra_state(self) -> Mapping[str, Stateful]:
        for each in self._model.modules():
            # A router converts its bias in the first pass; checkpoints of later steps have it converted.
            if isinstance(each, Router) and isinstance(
                bias := getattr(each, "expert_bias", None), torch.Tensor
            ):
                bias.data = bias.data.float()
        scalers = [getattr(each, "grad_scaler", None) for each in _members(self._optimizer)]
        kept: dict[str, Stateful] = {"megatron/streams": Streams(), "megatron/losses": Losses()}
        return kept | {
            f"megatron/scaler {place}": each for place, each in enumerate(scalers) if each is not None
        }

    def checkpoint_functions(self) -> Mapping[str, Phase]:
        package = "megatron.core.dist_checkpointing"
        return {
            f"{place}.{name}": phase
            for place in (package, f"{package}.serialization")
            for name, phase in {"save": Phase.CHECKPOINT_WRITE, "load": Phase.CHECKPOINT_READ}.items()
        }

    def _shards(self, role: LayerKind) -> dict[str, list[torch.Tensor]]:
        """The shards that only this rank updates in the distributed optimizer, by optimizer and group."""
        return {
            f"{number}.group.{place}": shards
            for number, each in enumerate(_members(self._optimizer))
            if isinstance(each, DistributedOptimizer)
            for place, group in enumerate(each.optimizer.param_groups)
            if bool(group.get("is_expert_parallel")) is (role is LayerKind.EXPERT)
            and (shards := [shard for shard in group["params"] if _has_elements(shard)])
        }

    def _sharded(self) -> list[FullyShardedDataParallel]:
        return [each for each in self._chunks if isinstance(each, FullyShardedDataParallel)]

    @property
    def _along(self) -> str:
        """The axis of data parallelism."""
        return "shard" if self._sharded() else "replica"

    def _show_shards(self) -> None:
        for chunk in self._sharded() if self.obstacle is None else ():
            show_shards(chunk)

    def _peers(self, role: LayerKind) -> list[_Place]:
        """The ranks that update other shards of the same parameters; empty before ``mesh`` was called."""
        own = self._dense_address() if role is LayerKind.DENSE else self._expert_address()
        of = [(each, each.dense if role is LayerKind.DENSE else each.expert) for each in self._places]
        along = {"replica": own.replica, "shard": own.shard}
        return [each for each, address in of if replace(address, **along) == own]

    def _parts(self) -> list[Part]:
        return [Part(plain_name(dotted), each) for dotted, each in self._model.named_modules()]

    def _layers(self) -> tuple[Part, ...]:
        return tuple(each for each in self._parts() if isinstance(each.module, BaseTransformerLayer))

    def _dense_address(self) -> MeshAddress:
        return MeshAddress(
            **{self._along: parallel_state.get_data_parallel_rank()},
            tensor=parallel_state.get_tensor_model_parallel_rank(),
            pipeline=parallel_state.get_pipeline_model_parallel_rank(),
            context=parallel_state.get_context_parallel_rank(),
        )

    def _expert_address(self) -> MeshAddress:
        """Experts have their own tensor and data parallelism, which includes context parallelism."""
        return MeshAddress(
            **{self._along: parallel_state.get_expert_data_parallel_rank()},
            tensor=parallel_state.get_expert_tensor_parallel_rank(),
            pipeline=parallel_state.get_pipeline_model_parallel_rank(),
            expert=parallel_state.get_expert_model_parallel_rank(),
        )


def _members(optimizer: MegatronOptimizer | None) -> list[MegatronOptimizer]:
    """The optimizers that update something: all parameters of a rank may be frozen."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [each for each in chained if each is not None and not each.is_stub_optimizer]


def _layer_obstacle(chunk: Any) -> str | None:
    if getattr(chunk.config, "cuda_graph_impl", "none") != "none":
        return "layers that Megatron runs as CUDA graphs cannot be called again"
    if any(getattr(chunk.config, each, None) for each in ("fp8", "fp4")):
        return "layers that Megatron runs in fp8 or fp4 would be replayed in another precision"
    return None


def _has_elements(shard: torch.Tensor) -> bool:
    return (shard.to_local() if isinstance(shard, DTensor) else shard).numel() > 0
