"""Gathers sharded parameters for a replay, and reduces its gradients (paper, sections 6.1.2 and 9).

Gathering uses the calls and process groups of FSDP, or of another framework, as training does. The reduction
is a reduce-scatter among the shards and, if replicas have the same shards, an all-reduce among those. It uses
training's own groups and sizes; one of each for a whole layer, even if FSDP divides it into several groups.
No gradient of training is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from torchscout.c3.signature import PendingSignatures
from torchscout.mesh import Axis, LayerKind, Mesh
from torchscout.replay import fsdp_state
from torchscout.replay.guard import announced

__all__ = [
    "GradientLookup",
    "ParameterGatherers",
    "Reduction",
    "gathered",
    "gathered_again",
    "gatherers_of",
    "initialize",
    "reduce_scatter",
    "route_of",
]

# Renamed in PyTorch 2.13, where the old name warns.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Route:
    """The process groups that reduce the gradients of this rank's shards."""

    shard: dist.ProcessGroup
    replica: dist.ProcessGroup | None
    """None if each shard has a single owner."""
    dimension: int
    """The sharded dimension of the parameters' device mesh."""


def route_of(
    parameters: Sequence[torch.Tensor], mesh: Mesh, rank: int, role: LayerKind = LayerKind.DENSE
) -> Route | None:
    """Return None if parameters are not all sharded in the same way, or not as the mesh says."""
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
    """Reduces one layer's gradients. Allocates memory on construction, so that ``run`` needs none."""

    def __init__(self, route: Route, parameters: Sequence[torch.Tensor]) -> None:
        self._route = route
        ranks = route.shard.size()
        part = math.ceil(sum(_whole_size(each, route) for each in parameters) / ranks)
        local = parameters[0].to_local() if isinstance(parameters[0], DTensor) else parameters[0]
        self._given = local.new_zeros(ranks * part, requires_grad=False)
        self._got = local.new_zeros(part, requires_grad=False)

    @property
    def has_copies(self) -> bool:
        """Whether other replicas compute the same shards of gradients."""
        return self._route.replica is not None

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set the gradients to reduce. Zeros are reduced without this call: a failed rank takes part."""
        place = 0
        for each in gradients:
            if each is not None:
                flat = (each.to_local() if isinstance(each, DTensor) else each).detach().flatten()
                self._given[place : place + flat.numel()].copy_(flat)
                place += flat.numel()

    def run(self) -> list[PendingSignatures]:
        """Return signatures of this rank's shard: reduced among the shards, then also among the replicas."""
        reduce_scatter(self._got, self._given, op=dist.ReduceOp.AVG, group=self._route.shard)
        scattered = PendingSignatures([self._got])
        self._given.zero_()
        if self._route.replica is None:
            return [scattered]
        dist.all_reduce(self._got, op=dist.ReduceOp.AVG, group=self._route.replica)
        return [scattered, PendingSignatures([self._got])]


def _whole_size(parameter: torch.Tensor, route: Route) -> int:
    """Return the elements of a gathered parameter, rounded up: tensor parallelism may divide it unevenly."""
    sizes = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if axis != route.dimension and isinstance(placement, Shard):
                sizes[placement.dim] = math.ceil(sizes[placement.dim] / parameter.device_mesh.size(axis))
    return math.prod(sizes)


GradientLookup = Callable[[torch.Tensor], torch.Tensor | None]
"""Returns the gradient of a parameter, if backward does not return it."""


class ParameterGatherer(Protocol):
    """Gathers parameters: an FSDP module, or its equivalent in another framework."""

    def unshard(self) -> Any:
        """Gather the parameters. Called on every rank or on none."""
        ...

    def reshard(self) -> Any:
        """Undo ``unshard``."""
        ...


@dataclass(frozen=True, slots=True)
class ParameterGatherers:
    """What gathers the parameters of one module."""

    modules: tuple[ParameterGatherer, ...] = ()
    """The FSDP modules inside the module, and the nearest one around it if it is none itself: an embedding or
    output layer usually belongs to the root, which gathers only what no module inside it gathers."""
    root: FSDPModule | None = None
    """The outermost FSDP module around it."""
    copies: bool = True
    """Whether peers have the same shards."""
    is_mixed: bool = False
    """Whether peers belong to several replicas, and gather from the shards of their own replica."""
    route: Route | None = None
    """How its gradients are reduced, if that is replayed too."""
    together: frozenset[int] = frozenset()
    """The ranks that execute one call of the module together, in tensor or context parallelism."""
    around: Callable[[], AbstractContextManager[GradientLookup | None]] = nullcontext
    """Entered around each replay of the module: restores what its passes write elsewhere."""
    kept_among: frozenset[int] = frozenset()
    """The ranks among which shards are gathered and gradients reduced, as far as known."""

    @property
    def expected(self) -> frozenset[int]:
        """The ranks with which training communicates while it runs the module."""
        return self.together | self.kept_among

    @property
    def obstacle(self) -> str | None:
        """Why a replay could harm training: FSDP would take a failed call for an unfinished pass."""
        lacking = None if self.root is None else fsdp_state.missing(self.root)
        return lacking and f"FSDP's state cannot be reset after a replay: this PyTorch has no {lacking}"


def gatherers_of(model: nn.Module, module: nn.Module) -> ParameterGatherers:
    """Return the FSDP modules that gather the parameters of ``module``, a part of ``model``."""
    around = [each for each in _path(model, module) if isinstance(each, FSDPModule)]
    inside = [each for each in module.modules() if isinstance(each, FSDPModule)]
    nearest = [] if isinstance(module, FSDPModule) else around[-1:]
    return ParameterGatherers((*nearest, *inside), next(iter([*around, *inside]), None))


def initialize(gatherers: ParameterGatherers) -> None:
    """Initialize FSDP before the first training step; see ``fsdp_state.initialize``."""
    if gatherers.root is not None:
        fsdp_state.initialize(gatherers.root)


@contextmanager
def gathered(gatherers: ParameterGatherers, gathering: AbstractContextManager[None]) -> Iterator[None]:
    """Gather the parameters for this block; afterwards reshard them and reset FSDP's state.

    FSDP records which modules of a group were called. If only one of them was replayed, it would reduce the
    next step's gradients in other portions. ``gathering`` is entered only while parameters are gathered.
    """
    with gathering, announced():
        for gatherer in gatherers.modules:
            gatherer.unshard()
    try:
        with fsdp_state.without_prefetch(gatherers.modules):
            yield
    finally:
        with announced():
            for gatherer in gatherers.modules:
                gatherer.reshard()
        _reset(gatherers)


@contextmanager
def gathered_again(gatherers: ParameterGatherers) -> Iterator[None]:
    """Gather the parameters again after this block, which runs a forward pass, even if the pass fails.

    FSDP may reshard them after a forward pass and gather them in backward, which a failed rank would not
    reach. So all ranks gather them here.
    """

    def gather_again() -> None:
        with announced():
            for gatherer in gatherers.modules:
                gatherer.reshard()
                gatherer.unshard()

    with ExitStack() as finally_do:
        finally_do.callback(gather_again)
        on_failure = finally_do.enter_context(ExitStack())
        on_failure.callback(_reset, gatherers)
        yield
        on_failure.pop_all()


def _reset(gatherers: ParameterGatherers) -> None:
    """Loses nothing: right after an update, FSDP is not in the middle of a pass of training."""
    if gatherers.root is not None:
        fsdp_state.reset(gatherers.root)


def _path(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """Return the modules that contain a module, outermost first."""
    dotted = next((name for name, each in model.named_modules() if each is module), "")
    parts = dotted.split(".") if dotted else []
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
