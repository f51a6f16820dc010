"""What a framework must tell SCOUT about a job (paper, sections 4 and 9).

``Adapter`` is the protocol; its docstrings say when each method is called. ``mesh_of`` turns what a user
says about parallelism into a mesh. ``Updates`` hooks optimizers that a framework wraps, which have no
hooks of their own; for PyTorch's optimizers see ``pytorch.around_steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from torchscout.adapters.structure import Part, Structure, surface_of
from torchscout.config import Parallelism
from torchscout.decision.record import Surface
from torchscout.mesh import AXES, LayerKind, Mesh
from torchscout.replay.recipes.working_copies import WorkingCopies
from torchscout.replay.sharded_parameters import ParameterGatherers

if TYPE_CHECKING:
    from torchscout.checkpoint.state.training_state import Stateful

__all__ = ["Adapter", "Updates", "mesh_along", "mesh_from", "overwritten"]

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
        if parallelism.expert_within_data > 1:
            mesh = mesh.carve_experts(parallelism.expert_within_data, out_of=mesh.peer_axis())
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


class Adapter(Protocol):
    """One job, seen through one framework. All is asked at attach, on every rank."""

    @property
    def model(self) -> torch.nn.Module:
        """All that this rank trains, as one module: what checkpoints hold."""
        ...

    @property
    def obstacle(self) -> str | None:
        """In one sentence why replay would not be right for this job, the same on every rank; mostly None."""
        ...

    def mesh(self, hosts: Sequence[str]) -> Mesh:
        """Who does the same work; ``hosts`` has each rank's machine. A ``ValueError`` says what to pass."""
        ...

    def layers(self) -> Sequence[torch.nn.Module]:
        """The repeated layers, in the order of the forward pass; those of this rank's stage."""
        ...

    def structure(
        self,
        *,
        embedding: str | None = None,
        layers: str | Sequence[str] | None = None,
        output: str | None = None,
    ) -> Structure:
        """What replay works on; a path the user gives wins. A ``ValueError`` says what to pass."""
        ...

    def experts(self, named: str | Sequence[str] | None = None) -> Sequence[Part]:
        """What computes the rows that a router sends it; none where the model is dense."""
        ...

    def parameters(self) -> Mapping[Surface, torch.Tensor]:
        """What this rank holds of the model, by the surface of each; all of it, or its shards. Copies that
        optimizers update in its place are named after it, as ``layer.2.up/weight.main``."""
        ...

    def gatherers(self, module: torch.nn.Module) -> ParameterGatherers:
        """What gathers this module's parameters before it can be called; empty if they are not sharded."""
        ...

    def unreplicated(self) -> Collection[Surface]:
        """Those of them that replicas do not keep equal."""
        ...

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """What computes the updates; where a framework wraps them, what is inside."""
        ...

    def owned(self, role: LayerKind = LayerKind.DENSE) -> Mapping[Surface, torch.Tensor]:
        """What optimizers update on this rank alone, though the model's parameters have copies: ZeRO's. Of
        experts, or of all else; peers use the same names, whatever each has under them."""
        ...

    def working_copies(self) -> WorkingCopies:
        """Parameters that each update writes anew from what optimizers update in their place, as they are
        now; asked after every update. ``adapters.base.overwritten`` finds most of them."""
        ...

    def hook_updates(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Call ``before`` and ``after`` around every update of the job, a training step each, until what is
        returned is called. ``after`` comes when the model has its new parameters."""
        ...

    def finish_update(self) -> None:
        """Called on every rank before a check: what an update leaves to the next pass must be done now."""
        ...

    def state(self) -> Mapping[str, Stateful]:
        """What checkpoints must keep besides model and optimizers, by name: schedules, scalers, positions."""
        ...


Undo = Callable[[], None]


def overwritten(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[Surface, torch.Tensor]:
    """The parameters that are trained, though optimizers update something else in their place."""
    own = {surface_of(name): each for name, each in model.named_parameters()}
    updated = {id(each) for of in optimizers for group in of.param_groups for each in group["params"]}
    if updated <= {id(each) for each in own.values()}:
        return {}
    return {name: each for name, each in own.items() if each.requires_grad and id(each) not in updated}


class Updates:
    """One optimizer's ``step``, and whoever is to be called around it.

    The method is replaced on the object while anybody listens. Whoever comes and goes may do so in any order:
    were each to wrap what it finds, the first to leave would take others along, or leave itself behind.
    """

    def __init__(self, optimizer: Any, meanwhile: Callable[[], Undo] = lambda: lambda: None) -> None:
        """``meanwhile`` is called when the first one comes, and what it returns when the last one leaves."""
        self._optimizer, self._meanwhile = optimizer, meanwhile
        self._listening: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._undo = ExitStack()

    def tell(self, before: Callable[[], None], after: Callable[[], None]) -> Undo:
        """Until what is returned is called; ``after`` comes once the whole step is over."""
        if not self._listening:
            self._begin()
        pair = (before, after)
        self._listening.append(pair)

        def leave() -> None:
            if pair in self._listening:
                self._listening.remove(pair)
                if not self._listening:
                    self._undo.close()

        return leave

    def _begin(self) -> None:
        optimizer = self._optimizer
        own, step = vars(optimizer).get("step"), optimizer.step

        def around(*args: Any, **kwargs: Any) -> Any:
            for before, _ in [*self._listening]:
                before()
            result = step(*args, **kwargs)
            for _, after in [*self._listening]:
                after()
            return result

        self._undo.callback(self._meanwhile())
        optimizer.step = around
        # What its class has is found again once the object has none of its own.
        self._undo.callback(
            *((delattr, optimizer, "step") if own is None else (setattr, optimizer, "step", own))
        )
