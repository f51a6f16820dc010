"""DeepSpeed's engines: ZeRO 0 to 3, pipelines, experts, Ulysses, AutoTP (paper, section 9).

A training step is one call of the engine's optimizer, at the end of an accumulation. With ZeRO 1 and 2 each
rank owns a part of the optimizer state, although parameters are replicated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import groups
from torch.distributed.device_mesh import DeviceMesh

from torchscout.adapters.base import UpdateHooks, mesh_from, overwritten
from torchscout.adapters.modules import without_hooks
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
from torchscout.mesh import AXES, LayerKind, Mesh
from torchscout.replay.capture.context import register_tracker
from torchscout.replay.recipes.working_copies import WorkingCopies
from torchscout.replay.sharded_parameters import ParameterGatherers

if TYPE_CHECKING:
    from torchscout.state.collect import Stateful

__all__ = ["DeepSpeedAdapter", "adapter_of"]

_LATE = "ZeRO 3 gathers it in the next pass"
_SECONDARY = "hpZ writes it in the forward pass"
_USES: Uses = {
    "deepspeed.checkpointing.get_cuda_rng_tracker": (),
    "deepspeed.zero.GatheredParameters": (),
    "deepspeed.zero.ZeroParamStatus.AVAILABLE": (),
    **{
        f"deepspeed.DeepSpeedEngine.{name}": ()
        for name in (
            "autotp_size",
            "zero_hpz_partition_size",
            "zero_offload_optimizer",
            "zero_offload_param",
            "zero_optimization_stage",
            "zero_quantized_gradients",
            "zero_quantized_weights",
        )
    },
    **{
        f"deepspeed.utils.groups._get_{name}": ()
        for name in (
            "expert_parallel_group_dict",
            "model_parallel_world_size",
            "sequence_parallel_world_size",
        )
    },
}
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def adapter_of(
    model: Any,
    optimizer: Any,  # noqa: ARG001  the engine has it
    parallelism: Mesh | DeviceMesh | Parallelism | None,
) -> DeepSpeedAdapter | None:
    """Return the adapter if the model is one of DeepSpeed's engines."""
    if not isinstance(model, deepspeed.DeepSpeedEngine):
        return None
    require("deepspeed", deepspeed.__version__, _USES, _attributes(model))
    return DeepSpeedAdapter(model, parallelism)


def _attributes(engine: deepspeed.DeepSpeedEngine) -> Iterator[tuple[object, str]]:
    """The attributes that are used here, except those of loss scalers, which few engines have."""
    for name in ("module", "optimizer", "lr_scheduler", "zenflow", *_COUNTERS):
        yield engine, name
    if isinstance(engine, PipelineEngine):
        yield engine, "grid"
        yield engine.module, "micro_offset"
    if engine.zero_optimization_stage() < 3:
        return
    for name in ("fp16_groups", "fp32_partitioned_groups_flat", "invalidate_secondary_tensor"):
        yield engine.optimizer, name
    for name in ("forward_hooks", "backward_hooks"):
        yield engine.optimizer, f"parameter_offload.{name}"
    for name in ("ds_numel", "ds_persist", "ds_process_group", "ds_status", "ds_tensor", "partition"):
        yield next(engine.module.parameters()), name


class DeepSpeedAdapter:
    """An engine that ``deepspeed.initialize`` returned."""

    def __init__(
        self, engine: deepspeed.DeepSpeedEngine, parallelism: Mesh | DeviceMesh | Parallelism | None
    ) -> None:
        self._engine = engine
        self._parallelism = parallelism
        self._stage = int(engine.zero_optimization_stage())
        self._copies: Mapping[Surface, torch.Tensor] | None = None
        self._updates = UpdateHooks(engine.optimizer, lambda: register_tracker("deepspeed", _Streams()))

    @property
    def model(self) -> torch.nn.Module:
        module: torch.nn.Module = self._engine.module
        return module

    @property
    def obstacle(self) -> str | None:
        engine = self._engine
        offloading = [engine.zero_offload_optimizer(), engine.zero_offload_param()]
        given = [each for each in offloading if each is not None]
        refused = {
            "offloading to NVMe": any(each.device == "nvme" for each in given),
            "SuperOffload": any(getattr(each, "super_offload", False) for each in given),
            "ZenFlow": bool(engine.zenflow),
            "optimizers that are not PyTorch's": not self.optimizers() and engine.optimizer is not None,
        }
        if found := [name for name, is_used in refused.items() if is_used]:
            return f"the state of DeepSpeed's {' or '.join(found)} cannot be read between two updates"
        return None

    @property
    def layer_obstacle(self) -> str | None:
        quantized = self._engine.zero_quantized_weights() or self._engine.zero_quantized_gradients()
        refused = [*(["quantized weights or gradients"] if quantized else []), *self._unknown_experts]
        if refused:
            return f"DeepSpeed's {' or '.join(refused)} cannot be called again as in training"
        return None

    @cached_property
    def _unknown_experts(self) -> list[str]:
        """Kinds of experts whose copies on other ranks are not known, so that nothing of them is compared."""
        if not any(map(is_moe_param, self.model.parameters())):
            return []
        has_experts, masters = bool(self._spreads()), not self._is_partitioned and self._masters("master")
        refused = {
            "AutoEP": not has_experts,
            "experts under ZeRO 3": has_experts and self._stage == 3,
            "experts in half precision without ZeRO": has_experts and bool(masters),
            "experts of several ep_size": len(self._spreads()) > 1,
            "experts that are not spread over neighbours": not self._are_experts_as_in_mesh(),
        }
        return [name for name, is_used in refused.items() if is_used]

    def mesh(self, hosts: Sequence[str]) -> Mesh:
        if self._parallelism is not None:
            return mesh_from(self._parallelism, dist.get_world_size(), hosts)
        table = self._table()
        (spread,) = self._spreads() if len(self._spreads()) == 1 and not self._unknown_experts else (1,)
        return Mesh(table, hosts).carve_experts(spread) if spread > 1 else Mesh(table, hosts)

    def layers(self) -> Sequence[torch.nn.Module]:
        return [layer.module for layer in layers_of(self._laid_out())]

    def structure(
        self,
        *,
        embedding: str | None = None,
        layers: str | Sequence[str] | None = None,
        output: str | None = None,
    ) -> Structure:
        return structure_of(self._laid_out(), embedding=embedding, layers=layers, output=output)

    def experts(self, named: str | Sequence[str] | None = None) -> Sequence[Part]:
        if named is not None:
            return experts_of(self.model, named)
        if self._unknown_experts:
            return []
        return [
            Part(f"{plain_name(name)}.deepspeed_experts.{place}", expert)
            for name, each in self.model.named_modules()
            if isinstance(each, Experts)
            for place, expert in each.deepspeed_experts.named_children()
        ]

    def parameters(self) -> Mapping[Surface, torch.nn.Parameter]:
        own = {surface_of(name): each for name, each in self.model.named_parameters()}
        return own if self._is_partitioned or self._unknown_experts else {**own, **self._masters("master")}

    def gatherers(self, module: torch.nn.Module) -> ParameterGatherers:
        return ParameterGatherers(() if self._stage < 3 else (_Gatherer(self._engine, module),))

    def unreplicated_parameters(self) -> Collection[Surface]:
        if self._spreads() <= {1} and not self._unknown_experts:
            return ()
        return {surface_of(name) for name, each in self.model.named_parameters() if is_moe_param(each)}

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        found = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        return [found] if isinstance(found, torch.optim.Optimizer) else []

    def owned_state(self, role: LayerKind = LayerKind.DENSE) -> Mapping[Surface, torch.Tensor]:
        if role is LayerKind.EXPERT:
            return {}
        if self._stage < 3:
            owned = self._masters("partition") if self._is_partitioned or self._unknown_experts else {}
            of_experts = [*self.unreplicated_parameters()] if self._unknown_experts else []
            return {**owned, **{name: self.parameters()[name] for name in of_experts}}
        named: Any = self.model.named_parameters()
        shards = {surface_of(name): each.ds_tensor for name, each in named}
        updated = enumerate(self._engine.optimizer.fp32_partitioned_groups_flat)
        return {**shards, **{f"optimizer.{place}/partition": each for place, each in updated}}

    def padding(self) -> Mapping[Surface, Sequence[range]]:
        """ZeRO 3 makes all parts of a parameter equally long, and does not initialize what it adds."""
        if self._stage < 3:
            return {}
        found = {surface_of(name): [_padding(each)] for name, each in self.model.named_parameters()}
        for place, group in enumerate(self._engine.optimizer.fp16_groups):
            begins = accumulate((each.ds_tensor.ds_numel for each in group), initial=0)
            found[f"optimizer.{place}/partition"] = [
                _padding(each, begin) for each, begin in zip(group, begins, strict=False)
            ]
        return {name: [each for each in every if each] for name, every in found.items() if any(every)}

    def working_copies(self) -> WorkingCopies:
        """ZeRO 3 gathers small parameters at the end of an update, and keeps them gathered until the next."""
        if self._stage < 3:
            if self._copies is None:
                self._copies = overwritten(self.model, self.optimizers())
            return WorkingCopies(self._copies)
        named: Any = self.model.named_parameters()
        every = {surface_of(name): each for name, each in named if each.requires_grad}
        kept = {f"{name}.gathered": each for name, each in every.items() if each.ds_persist}
        unwatched = {name: _LATE for name, each in kept.items() if not _is_gathered(each)}
        resting = {name: each for name, each in kept.items() if name not in unwatched}
        if self._engine.zero_hpz_partition_size() > 1:
            unwatched |= dict.fromkeys([f"{name}.secondary" for name in every], _SECONDARY)
        return WorkingCopies(resting, unwatched)

    def hook_updates(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Hook the outermost optimizer: after the inner one's step, only this rank's part is new."""
        return self._updates.add(before, after)

    def finish_update(self) -> None:
        """Nothing is deferred."""

    def extra_state(self) -> Mapping[str, Stateful]:
        engine, found = self._engine, dict[str, Any]()
        found["counters"] = _Numbers(engine, _COUNTERS)
        found["rng_tracker"] = _Streams()
        if self._stage == 3:
            found["gathered"] = _Gathered(self._engine)
        if isinstance(engine, PipelineEngine):
            found["micro_offset"] = _Numbers(engine.module, ["micro_offset"])
        if engine.lr_scheduler is not None:
            found["lr_scheduler"] = engine.lr_scheduler
        for name in ("loss_scaler", "loss_scale_config"):
            if (scaler := getattr(engine.optimizer, name, None)) is not None:
                found[name] = _Numbers(scaler)
        return {f"deepspeed/{name}": each for name, each in found.items()}

    def checkpoint_functions(self) -> Mapping[str, Phase]:
        engine = "deepspeed.DeepSpeedEngine"
        return {
            f"{engine}.save_checkpoint": Phase.CHECKPOINT_WRITE,
            f"{engine}.save_16bit_model": Phase.CHECKPOINT_WRITE,
            f"{engine}.load_checkpoint": Phase.CHECKPOINT_READ,
        }

    @property
    def _is_partitioned(self) -> bool:
        """Whether optimizer state is partitioned; DeepSpeed's optimizer for bfloat16 always does that."""
        return self._stage > 0 or isinstance(self._engine.optimizer, BF16_Optimizer)

    def _masters(self, kind: str) -> dict[Surface, Any]:
        """What the optimizer updates that is not a parameter of the model."""
        known = {id(each) for each in self.model.parameters()}
        return {
            f"optimizer.{place}/{kind}.{number}": each
            for optimizer in self.optimizers()
            for place, group in enumerate(optimizer.param_groups)
            for number, each in enumerate(group["params"])
            if id(each) not in known
        }

    def _spreads(self) -> set[int]:
        """The numbers of ranks over which the experts of a layer are spread."""
        return {each.ep_size for each in self.model.modules() if isinstance(each, MoE)}

    def _are_experts_as_in_mesh(self) -> bool:
        """Whether DeepSpeed's expert groups are those of the mesh."""
        if len(self._spreads()) != 1:
            return True
        world, rank = dist.get_world_size(), dist.get_rank()
        mesh = Mesh(self._table(), [""] * world).carve_experts(*self._spreads())
        found = groups._get_expert_parallel_group_dict().values()
        expected = mesh.ranks_along("expert", rank, LayerKind.EXPERT)
        return all(tuple(sorted(dist.get_process_group_ranks(each))) == expected for each in found)

    def _table(self) -> Any:
        """The address of every rank, without experts."""
        table = np.zeros((dist.get_world_size(), len(AXES)), dtype=np.int64)
        for axis, coordinates in self._places().items():
            table[:, AXES.index(axis)] = coordinates
        return table

    def _laid_out(self) -> torch.nn.Module:
        """The model; a pipeline stage, which is no ``Sequential`` by its class, as one."""
        if not isinstance(self._engine, PipelineEngine):
            return self.model
        return torch.nn.Sequential(OrderedDict(self.model.named_children()))

    def _places(self) -> dict[str, Sequence[int]]:
        """The coordinates of every rank, by axis."""
        world, data = dist.get_world_size(), "shard" if self._stage == 3 else "replica"
        if isinstance(self._engine, PipelineEngine):
            topology = self._engine.grid.topology()
            coordinates = [topology.get_coord(rank) for rank in range(world)]
            names = {"pipe": "pipeline", "data": data, "model": "tensor"}
            return {
                names[axis]: [getattr(each, axis) for each in coordinates]
                for axis in topology.get_axis_names()
            }
        inner = {
            "context": groups._get_sequence_parallel_world_size(),
            "tensor": self._engine.autotp_size(),
        }
        axis, size = max(inner.items(), key=lambda each: each[1])
        model_parallel = groups._get_model_parallel_world_size()
        if sum(each > 1 for each in inner.values()) > 1 or model_parallel > max(1, inner["tensor"]):
            raise ValueError(
                "this DeepSpeed engine does not show which ranks do the same work; "
                "pass parallelism=, such as Parallelism(replica=4, tensor=2)"
            )
        if size <= 1:
            return {data: range(world)}
        return {data: [rank // size for rank in range(world)], axis: [rank % size for rank in range(world)]}


def _padding(parameter: Any, begin: int = 0) -> range:
    """What does not count in this rank's part of a parameter, which begins at this element of a tensor."""
    size = parameter.ds_tensor.ds_numel
    left = parameter.ds_numel - size * dist.get_rank(parameter.ds_process_group)
    return range(begin + min(max(left, 0), size), begin + size)


class _Gatherer:
    """Gathers the parameters of one module that ZeRO 3 keeps in shards.

    DeepSpeed's own hooks are removed meanwhile: they would gather the parameters as well, and learn the order
    of training's calls from this one.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine, module: torch.nn.Module) -> None:
        self._offload, self._module = engine.optimizer.parameter_offload, module
        self._undo = ExitStack()

    def unshard(self) -> None:
        scattered = [each for each in self._module.parameters() if not _is_gathered(each)]
        self._undo.enter_context(deepspeed.zero.GatheredParameters(scattered))
        hooks = {each.id for each in (*self._offload.forward_hooks, *self._offload.backward_hooks)}
        self._undo.enter_context(without_hooks(self._module, lambda key, _: key in hooks))

    def reshard(self) -> None:
        self._undo.close()


def _is_gathered(parameter: Any) -> bool:
    return bool(parameter.ds_status == deepspeed.zero.ZeroParamStatus.AVAILABLE)


class _Gathered:
    """What ZeRO 3 has gathered, completely or within a machine (hpZ). It has no state of its own, but has to
    be dropped when shards are loaded."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: Mapping[str, Any]) -> None:
        self._engine.optimizer.invalidate_secondary_tensor()
        parameters: Any = self._engine.module.parameters()  # DeepSpeed has added methods to them
        for each in parameters:
            if _is_gathered(each):
                each.partition(has_been_updated=False)


class _Numbers:
    """Attributes of an object as state: the named ones, or all that are numbers."""

    def __init__(self, owner: object, names: Collection[str] | None = None) -> None:
        self._owner = owner
        plain = (bool, int, float)
        self._names = names or [name for name, each in vars(owner).items() if isinstance(each, plain)]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self._owner, name, value)


class _Streams:
    """The named random streams of DeepSpeed."""

    def get_states(self) -> dict[str, torch.Tensor]:
        states = deepspeed.checkpointing.get_cuda_rng_tracker().get_states()
        return {name: each.clone() for name, each in states.items()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
        given = {name: each.clone() for name, each in states.items()}
        tracker.set_states({**tracker.get_states(), **given})

    state_dict = get_states
    load_state_dict = set_states
