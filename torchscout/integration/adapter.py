"""What a framework must tell SCOUT about a job (paper, sections 4 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from torchscout.decision.record import Surface
from torchscout.integration.structure import Part, Structure
from torchscout.mesh import LayerKind, Mesh
from torchscout.replay.recipes.working_copies import WorkingCopies
from torchscout.replay.sharded_parameters import ParameterGatherers

if TYPE_CHECKING:
    from torchscout.checkpoint.state import Stateful

__all__ = ["Adapter"]


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

    def keepers(self, module: torch.nn.Module) -> ParameterGatherers:
        """Who must gather this module's parameters before it can be called; nobody where they are whole."""
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
        now; asked after every update. ``integration.updates.overwritten`` finds most of them."""
        ...

    def at_updates(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Call ``before`` and ``after`` around every update of the job, a training step each, until what is
        returned is called. ``after`` comes when the model has its new parameters."""
        ...

    def settle(self) -> None:
        """Called on every rank before a check: what an update leaves to the next pass must be done now."""
        ...

    def state(self) -> Mapping[str, Stateful]:
        """What checkpoints must keep besides model and optimizers, by name: schedules, scalers, positions."""
        ...
