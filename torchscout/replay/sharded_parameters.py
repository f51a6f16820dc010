"""Gathers sharded parameters for a replay and reduces gradients on scratch tensors (paper, algorithm 2, line
8; sections 6.1.2 and 9).

Gathering uses the calls and process groups of FSDP, or of another framework, as training does. The
reduction is a reduce-scatter among the shards and, where replicas hold the same shards, an all-reduce
among those, on training's own groups and as large as training's; one of each for a whole layer, however
many parts FSDP keeps apart. No gradient of training is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from torchscout.decision.signature import PendingSignatures
from torchscout.mesh import Axis, LayerKind, Mesh
from torchscout.replay import fsdp_state
from torchscout.replay.guard import announced

__all__ = [
    "NOBODY",
    "Elsewhere",
    "ParameterGatherer",
    "ParameterGatherers",
    "Reduction",
    "Route",
    "awaken",
    "gathered",
    "gathered_again",
    "gatherers_of",
    "reduce_scatter",
    "route_of",
]

# Renamed in PyTorch 2.13, where the former name warns.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Route:
    """The groups that the gradients of this rank's shards go over."""

    shard: dist.ProcessGroup
    replica: dist.ProcessGroup | None
    """None where each shard has one owner."""
    dimension: int
    """Which axis of the parameters' device mesh the shards lie along."""


def route_of(
    parameters: Sequence[torch.Tensor], mesh: Mesh, rank: int, role: LayerKind = LayerKind.DENSE
) -> Route | None:
    """None where parameters are not sharded as the mesh says, or not all alike."""
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
    """Of one layer's gradients. Its memory is taken when it is made, so that ``run`` finds it there."""

    def __init__(self, route: Route, parameters: Sequence[torch.Tensor]) -> None:
        self._route = route
        ranks = route.shard.size()
        part = math.ceil(sum(_whole_size(each, route) for each in parameters) / ranks)
        local = parameters[0].to_local() if isinstance(parameters[0], DTensor) else parameters[0]
        self._given = local.new_zeros(ranks * part, requires_grad=False)
        self._got = local.new_zeros(part, requires_grad=False)

    @property
    def has_copies(self) -> bool:
        """Whether other replicas end up with the same shards of gradients."""
        return self._route.replica is not None

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """What is to be reduced. Without it zeros are: a rank that failed still takes part."""
        place = 0
        for each in gradients:
            if each is not None:
                flat = (each.to_local() if isinstance(each, DTensor) else each).detach().flatten()
                self._given[place : place + flat.numel()].copy_(flat)
                place += flat.numel()

    def run(self) -> list[PendingSignatures]:
        """Signatures of this rank's shard: reduced among the shards, then also among the replicas."""
        reduce_scatter(self._got, self._given, op=dist.ReduceOp.AVG, group=self._route.shard)
        scattered = PendingSignatures([self._got])
        self._given.zero_()
        if self._route.replica is None:
            return [scattered]
        dist.all_reduce(self._got, op=dist.ReduceOp.AVG, group=self._route.replica)
        return [scattered, PendingSignatures([self._got])]


def _whole_size(parameter: torch.Tensor, route: Route) -> int:
    """Elements of a gathered parameter, or somewhat more: tensor parallelism may cut unevenly."""
    sizes = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if axis != route.dimension and isinstance(placement, Shard):
                sizes[placement.dim] = math.ceil(sizes[placement.dim] / parameter.device_mesh.size(axis))
    return math.prod(sizes)


Elsewhere = Callable[[torch.Tensor], torch.Tensor | None]
"""Where the gradient of a parameter is, if backward does not return it."""


class ParameterGatherer(Protocol):
    """Who gathers parameters: an FSDP module, or what does so for another framework."""

    def unshard(self) -> Any:
        """Let a module be called: on every rank, or on none."""
        ...

    def reshard(self) -> Any:
        """Be as before that."""
        ...


@dataclass(frozen=True, slots=True)
class ParameterGatherers:
    """Those who keep one module's parameters."""

    modules: tuple[ParameterGatherer, ...] = ()
    """It, those inside it, or else the nearest around it: an embedding or output layer is mostly kept by the
    whole model, which gathers only what no part of it keeps."""
    root: FSDPModule | None = None
    """The outermost FSDP module around it."""
    copies: bool = True
    """Whether peers keep the same shards."""
    is_mixed: bool = False
    """Whether peers gather from the shards of several replicas, each from those of its own."""
    route: Route | None = None
    """Which way its gradients go, where that is replayed too."""
    together: frozenset[int] = frozenset()
    """The ranks that compute one call of the module together, in tensor or context parallelism."""
    around: Callable[[], AbstractContextManager[Elsewhere | None]] = nullcontext
    """Entered around each replay of the module: puts back what its passes write besides."""

    kept_among: frozenset[int] = frozenset()
    """The ranks among which shards are gathered and gradients reduced, as far as that is known."""

    @property
    def expected(self) -> frozenset[int]:
        """The ranks with which training itself communicates while it runs the module."""
        return self.together | self.kept_among

    @property
    def obstacle(self) -> str | None:
        """Why calling a kept module could harm training: a failed call would look like a pass under way."""
        lacking = None if self.root is None else fsdp_state.missing(self.root)
        return lacking and f"FSDP cannot forget a replayed pass: this PyTorch has no {lacking}"


NOBODY = ParameterGatherers()


def gatherers_of(model: nn.Module, module: nn.Module) -> ParameterGatherers:
    around = [each for each in _path(model, module) if isinstance(each, FSDPModule)]
    inside = [each for each in module.modules() if isinstance(each, FSDPModule)]
    nearest = [] if isinstance(module, FSDPModule) else around[-1:]
    return ParameterGatherers((*nearest, *inside), next(iter([*around, *inside]), None))


def awaken(gatherers: ParameterGatherers) -> None:
    """Let FSDP find out which module is the outermost, as it does in the first pass over the whole model.

    A part that is called before that would take itself for the whole. A ``ReplayError`` says if it cannot.
    """
    if gatherers.root is not None:
        fsdp_state.initialize(gatherers.root)


@contextmanager
def gathered(gatherers: ParameterGatherers, gathering: AbstractContextManager[None]) -> Iterator[None]:
    """In this block the kept parameters are whole; afterwards they are shards again, and FSDP has forgotten.

    It counts which of several modules that are kept as one were called: were only one of them replayed, it
    would reduce the next step's gradients in other portions. ``gathering`` is entered while parameters are
    being gathered.
    """
    with gathering, announced():
        for keeper in gatherers.modules:
            keeper.unshard()
    try:
        with fsdp_state.without_prefetch(gatherers.modules):
            yield
    finally:
        with announced():
            for keeper in gatherers.modules:
                keeper.reshard()
        _forget(gatherers)


@contextmanager
def gathered_again(gatherers: ParameterGatherers) -> Iterator[None]:
    """Around a forward pass: afterwards the parameters are gathered once more, even if it has failed.

    FSDP may let go of them after a forward pass and gather them in backward, to which a rank that has failed
    would not come. So it is done here, by all ranks alike, and backward finds them there.
    """
    try:
        with _forgetting_failures(gatherers):
            yield
    finally:
        with announced():
            for keeper in gatherers.modules:
                keeper.reshard()
                keeper.unshard()


@contextmanager
def _forgetting_failures(gatherers: ParameterGatherers) -> Iterator[None]:
    is_over = False
    try:
        yield
        is_over = True
    finally:
        if not is_over:
            _forget(gatherers)


def _forget(gatherers: ParameterGatherers) -> None:
    """Nothing of training's own is under way right after an update, so that nothing is lost."""
    if gatherers.root is not None:
        fsdp_state.reset(gatherers.root)


def _path(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The modules that contain a module, from the outside in."""
    dotted = next((name for name, each in model.named_modules() if each is module), "")
    parts = dotted.split(".") if dotted else []
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
