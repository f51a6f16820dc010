"""What a framework must tell SCOUT about a job (paper, sections 4 and 9)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from torchscout.decision.record import Surface
from torchscout.evidence.replay.sharded import Keepers
from torchscout.integration.structure import Part, Structure
from torchscout.mesh import Mesh

__all__ = ["Adapter"]


class Adapter(Protocol):
    """One job, seen through one framework. Every method is called once, at attach, on every rank."""

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
        """What the job steps; a training step ends with the last of them."""
        ...
