"""What a framework must tell SCOUT about a job (paper, sections 4 and 9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

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

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """What the job steps; a training step ends with the last of them."""
        ...
