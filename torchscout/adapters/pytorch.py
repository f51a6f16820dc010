"""Plain PyTorch: DDP, FSDP2, or whatever the user describes (paper, section 9)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn.parallel import DistributedDataParallel

from torchscout.adapters.base import mesh_along, mesh_from, overwritten
from torchscout.adapters.modules import wrapped
from torchscout.adapters.structure import Part, Structure, experts_of, layers_of, structure_of, surface_of
from torchscout.config import Parallelism
from torchscout.decision.progress import Phase
from torchscout.decision.types import Surface
from torchscout.mesh import LayerKind, Mesh
from torchscout.replay.recipes.working_copies import WorkingCopies
from torchscout.replay.sharded_parameters import ParameterGatherers, gatherers_of
from torchscout.utils._torch import StridedShard
from torchscout.utils.reentrancy import is_nested_step

if TYPE_CHECKING:
    from torchscout.state.collect import Stateful

__all__ = ["NoModelAdapter", "PyTorchAdapter", "around_steps"]


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
        # ``torch.compile`` may wrap it, or be inside.
        inside = (model, *(each for _, each in wrapped(model)))
        parallel = (each for each in inside if isinstance(each, DistributedDataParallel | FSDPModule))
        self._wrapper = next(parallel, model)
        self._copies = overwritten(model, optimizers)

    @property
    def model(self) -> torch.nn.Module:
        return self._model

    @property
    def obstacle(self) -> str | None:
        return None

    @property
    def layer_obstacle(self) -> str | None:
        return None

    def mesh(self, hosts: Sequence[str]) -> Mesh:
        world = dist.get_world_size()
        parallelism = self._parallelism or self._guessed(world)
        sharded = _sharded(self._model, parallelism) if isinstance(parallelism, DeviceMesh) else ()
        return mesh_from(parallelism, world, hosts, sharded)

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

    def experts(self, named: str | Sequence[str] | None = None) -> Sequence[Part]:
        return experts_of(self._model, named)

    def parameters(self) -> Mapping[Surface, torch.Tensor]:
        return {surface_of(name): parameter for name, parameter in self._model.named_parameters()}

    def gatherers(self, module: torch.nn.Module) -> ParameterGatherers:
        return gatherers_of(self._model, module)

    def unreplicated_parameters(self) -> Collection[Surface]:
        if not isinstance(self._wrapper, DistributedDataParallel):
            return ()
        return {surface_of(name) for name in self._wrapper.parameters_to_ignore}

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    def owned_state(self, role: LayerKind = LayerKind.DENSE) -> Mapping[Surface, torch.Tensor]:  # noqa: ARG002  none
        return {}

    def padding(self) -> Mapping[Surface, Sequence[range]]:
        return {}

    def working_copies(self) -> WorkingCopies:
        return WorkingCopies(self._copies)

    def hook_updates(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        return around_steps(self._optimizers, before, after)

    def finish_update(self) -> None:
        """Nothing is deferred."""

    def extra_state(self) -> Mapping[str, Stateful]:
        return {}

    def checkpoint_functions(self) -> Mapping[str, Phase]:
        return {}

    def _guessed(self, world: int) -> Mesh | DeviceMesh | Parallelism:
        """The parallelism that the wrapped model shows. Ranks are never assumed to be peers."""
        if world == 1:
            return Parallelism()
        if isinstance(self._wrapper, DistributedDataParallel):
            if self._wrapper.process_group.size() == world:
                return Parallelism(replica=world)
        elif isinstance(self._wrapper, FSDPModule):
            whole = {mesh for mesh, _ in _divisions(self._wrapper) if mesh.size() == world}
            if len(whole) == 1:
                return _named_or_plain(self._wrapper, *whole)
        kind = type(self._wrapper).__name__
        raise ValueError(
            f"a {kind} does not show which of the {world} ranks do the same work; "
            "pass parallelism=, such as Parallelism(replica=4, tensor=2) or a DeviceMesh with named axes"
        )


def around_steps(
    optimizers: Sequence[torch.optim.Optimizer], before: Callable[[], None], after: Callable[[], None]
) -> Callable[[], None]:
    """Call ``before`` before each optimizer's step, and ``after`` after the last one's, which ends the
    training step. Returns a function that removes the hooks."""

    def begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not is_nested_step(optimizer):
            before()

    def ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not is_nested_step(optimizer):
            after()

    hooks = [each.register_step_pre_hook(begins) for each in optimizers]
    hooks.append(optimizers[-1].register_step_post_hook(ended))

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def _divisions(model: torch.nn.Module) -> set[tuple[DeviceMesh, tuple[Placement, ...]]]:
    """The meshes of the parameters, with their placements."""
    return {(p.device_mesh, tuple(p.placements)) for p in model.parameters() if isinstance(p, DTensor)}


def _named_or_plain(model: torch.nn.Module, mesh: DeviceMesh) -> Mesh | DeviceMesh:
    """The axes of FSDP alone follow from its placements; with other parallelisms, from the names."""
    root = mesh._get_root_mesh()
    if root.size() == mesh.size() and root.ndim > mesh.ndim:
        return root  # FSDP sees several axes as one, such as shards and context
    placements = [each for on, each in _divisions(model) if on == mesh]
    if mesh.ndim == 1:
        return mesh_along(mesh, ["shard"])
    if mesh.ndim == 2 and all(first.is_replicate() and _is_shard(second) for first, second in placements):
        return mesh_along(mesh, ["replica", "shard"])
    return mesh


def _sharded(model: torch.nn.Module, device_mesh: DeviceMesh) -> set[str]:
    """The axes along which FSDP shards, including those that it sees as one axis with another name."""
    known = set(device_mesh.mesh_dim_names or ())
    seen: dict[str, bool] = {}
    has_shards = any(isinstance(each, FSDPModule) for each in model.modules())
    for mesh, placements in _divisions(model) if has_shards else ():
        for name, placement in zip(mesh.mesh_dim_names or (), placements, strict=False):
            seen[name] = seen.get(name, False) or _is_shard(placement)
    sharded = {name for name, is_sharded in seen.items() if is_sharded}
    return sharded if sharded <= known else sharded | (known - seen.keys())


def _is_shard(placement: Placement) -> bool:
    return isinstance(placement, Shard | StridedShard)


class NoModelAdapter(PyTorchAdapter):
    """A job whose model is not known: only its communication is watched (paper, section 7).

    Any program that uses ``torch.distributed``: training, inference, reinforcement learning.
    """

    def __init__(self) -> None:
        super().__init__(torch.nn.Module(), (), None)

    @property
    def obstacle(self) -> str | None:
        return "there is no model"

    def mesh(self, hosts: Sequence[str]) -> Mesh:
        """No two ranks are assumed to do the same work."""
        return Mesh.grid(pipeline=dist.get_world_size()).on(hosts)
