"""What a framework must tell SCOUT about a job (paper, sections 4 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from torchscout.decision.record import Surface
from torchscout.evidence.replay.sharded import Keepers
from torchscout.integration.structure import Part, Structure
from torchscout.mesh import Mesh

if TYPE_CHECKING:
    from torchscout.checkpoint.state import Stateful

__all__ = ["Adapter"]


class Adapter(Protocol):
    """One job, seen through one framework. All is asked at attach, on every rank."""

    @property
    def model(self) -> torch.nn.Module:
        """All that this rank trains, as one module: what checkpoints hold."""
        ...

    def obstacle(self) -> str | None:
        """Why replay would not be right for this job, in one sentence; None where it is."""
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

    def parameters(self) -> Mapping[Surface, torch.nn.Parameter]:
        """What this rank holds of the model, by the surface of each; all of it, or its shards."""
        ...

    def keepers(self, module: torch.nn.Module) -> Keepers:
        """Who must gather this module's parameters before it can be called; nobody where they are whole."""
        ...

    def unreplicated(self) -> Collection[Surface]:
        """Those of them that replicas do not keep equal."""
        ...

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """What computes the updates; where a framework wraps them, what is inside."""
        ...

    def owned(self) -> Mapping[Surface, torch.nn.Parameter]:
        """What optimizers update on this rank alone, though the model's parameters have copies: ZeRO's."""
        ...

    def at_updates(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Call ``before`` and ``after`` around every update of the job, a training step each, until what is
        returned is called. ``after`` comes when the model has its new parameters."""
        ...

    def state(self) -> Mapping[str, Stateful]:
        """What checkpoints must keep besides model and optimizers, by name: schedules, scalers, positions."""
        ...
