"""The protocol of framework adapters, and what several of them share (paper, sections 4 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from torchscout.adapters.structure import Part, Structure, surface_of
from torchscout.config import Parallelism
from torchscout.decision.progress import Phase
from torchscout.decision.types import Surface
from torchscout.mesh import AXES, LayerKind, Mesh
from torchscout.replay.recipes.working_copies import WorkingCopies
from torchscout.replay.sharded_parameters import ParameterGatherers

if TYPE_CHECKING:
    from torchscout.state.collect import Stateful

__all__ = ["Adapter", "UpdateHooks", "mesh_along", "mesh_from", "overwritten"]

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
    """Return the mesh that a user described, with the machines in ``hosts`` unless it has its own.

    ``sharded`` are the axes of a DeviceMesh along which FSDP shards: ``dp`` may mean that, or replicas.
    Raises ``ValueError`` if the description does not fit the job.
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
    """Convert a DeviceMesh, with SCOUT's names for its axes."""
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
    axes = ["shard" if _AXIS[name] == "replica" and name in sharded else _AXIS[name] for name in names]
    if not names or len(set(axes)) < len(axes):
        raise ValueError(
            f"every axis of a DeviceMesh needs a different name, got {names}; "
            "or pass parallelism=Parallelism(...)"
        )
    return axes


class Adapter(Protocol):
    """One job, seen through one framework. Every rank calls all methods while attaching."""

    @property
    def model(self) -> torch.nn.Module:
        """Everything that this rank trains, as one module; checkpoints contain it."""
        ...

    @property
    def obstacle(self) -> str | None:
        """A sentence that says why the state of this job cannot be seen, the same on every rank; usually
        None. Nothing is checked then, and there are no checkpoints."""
        ...

    @property
    def layer_obstacle(self) -> str | None:
        """A sentence that says why layers cannot be called again, the same on every rank; usually None.
        State, updates and transfers are checked all the same."""
        ...

    def mesh(self, hosts: Sequence[str]) -> Mesh:
        """Return which ranks do the same work; ``hosts`` has each rank's machine. Raises ``ValueError`` with
        what to pass if the framework does not show it."""
        ...

    def layers(self) -> Sequence[torch.nn.Module]:
        """Return the repeated layers of this rank's stage, in the order of the forward pass."""
        ...

    def structure(
        self,
        *,
        embedding: str | None = None,
        layers: str | Sequence[str] | None = None,
        output: str | None = None,
    ) -> Structure:
        """Return the modules to replay; paths that the user gives take precedence. Raises ``ValueError`` with
        what to pass if a module cannot be determined."""
        ...

    def experts(self, named: str | Sequence[str] | None = None) -> Sequence[Part]:
        """Return the modules that compute routed rows; empty for a dense model."""
        ...

    def parameters(self) -> Mapping[Surface, torch.Tensor]:
        """Return this rank's parameters or shards of them, by surface. Copies that optimizers update in their
        place are named after them: ``layer.2.up/weight.main``."""
        ...

    def gatherers(self, module: torch.nn.Module) -> ParameterGatherers:
        """Return what gathers the parameters of a module before a call; empty if they are not sharded."""
        ...

    def unreplicated_parameters(self) -> Collection[Surface]:
        """Return the parameters that replicas do not keep equal."""
        ...

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the optimizers that compute updates; the inner ones, if a framework wraps them."""
        ...

    def owned_state(self, role: LayerKind = LayerKind.DENSE) -> Mapping[Surface, torch.Tensor]:
        """Return what optimizers update on this rank only although parameters are replicated, as in ZeRO; of
        experts, or of everything else. Peers use the same names, with different contents."""
        ...

    def padding(self) -> Mapping[Surface, Sequence[range]]:
        """Return the elements of this rank's state that belong to no parameter, where there are any. They may
        hold any numbers."""
        ...

    def working_copies(self) -> WorkingCopies:
        """Return the parameters that each update overwrites with what optimizers update in their place.
        Called after every update. ``overwritten`` finds most of them."""
        ...

    def hook_updates(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Call ``before`` and ``after`` around every update, one per training step; ``after`` once the model
        has its new parameters. Returns a function that removes the hooks."""
        ...

    def finish_update(self) -> None:
        """Finish work that the update deferred to the next forward pass. Called on every rank before a
        check."""
        ...

    def extra_state(self) -> Mapping[str, Stateful]:
        """Return what checkpoints contain besides model and optimizers, by name: schedules, scalers,
        positions."""
        ...

    def checkpoint_functions(self) -> Mapping[str, Phase]:
        """Return the framework's own functions that read or write checkpoints, by their full names, such as
        ``deepspeed.DeepSpeedEngine.save_checkpoint``. PyTorch's are known."""
        ...


Undo = Callable[[], None]


def overwritten(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[Surface, torch.Tensor]:
    """Return the trained parameters in whose place optimizers update something else."""
    own = {surface_of(name): each for name, each in model.named_parameters()}
    updated = {id(each) for of in optimizers for group in of.param_groups for each in group["params"]}
    if updated <= {id(each) for each in own.values()}:
        return {}
    return {name: each for name, each in own.items() if each.requires_grad and id(each) not in updated}


class UpdateHooks:
    """Hooks around the ``step`` of an optimizer that has none.

    The method is replaced once, on the object, while there are hooks: if each hook wrapped the method that it
    finds, hooks could not be removed in any order.
    """

    def __init__(self, optimizer: Any, meanwhile: Callable[[], Undo] = lambda: lambda: None) -> None:
        """``meanwhile`` is called with the first hook, and what it returns when the last one is removed."""
        self._optimizer, self._meanwhile = optimizer, meanwhile
        self._hooks: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._undo = ExitStack()

    def add(self, before: Callable[[], None], after: Callable[[], None]) -> Undo:
        """Call ``before`` and ``after`` around each step; returns a function that removes them."""
        if not self._hooks:
            self._replace_step()
        pair = (before, after)
        self._hooks.append(pair)

        def remove() -> None:
            if pair in self._hooks:
                self._hooks.remove(pair)
                if not self._hooks:
                    self._undo.close()

        return remove

    def _replace_step(self) -> None:
        optimizer = self._optimizer
        own, step = vars(optimizer).get("step"), optimizer.step

        def around(*args: Any, **kwargs: Any) -> Any:
            for before, _ in [*self._hooks]:
                before()
            result = step(*args, **kwargs)
            for _, after in [*self._hooks]:
                after()
            return result

        self._undo.callback(self._meanwhile())
        optimizer.step = around
        # Without an attribute of the object, its class's method is found again.
        self._undo.callback(
            *((delattr, optimizer, "step") if own is None else (setattr, optimizer, "step", own))
        )
