"""What replay needs of the other ranks: its peers' evidence, the whole job's agreement (paper, section 6).

A protocol: ``integration.communicators`` owns the process groups behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from torchscout.decision.channel import PeerChannel
from torchscout.mesh import PeerGroup

__all__ = ["Everybody", "Peers"]


class Everybody(Protocol):
    """The whole job. Every rank of it makes the same calls in the same order."""

    size: int
    """How many ranks it has."""

    def highest(self, values: Sequence[int]) -> list[int]:
        """Each value's maximum over all ranks."""
        ...

    def first_problems(self, problems: Sequence[str | None]) -> list[str | None]:
        """For each piece of work what stands in its way on whichever rank, or None."""
        ...

    def exchange(self, document: Any) -> list[Any]:
        """Every rank's JSON document, by rank. For what is rare: it grows with the job."""
        ...


class Peers(Everybody, Protocol):
    """One rank's connections."""

    group: PeerGroup
    position: int
    """Of this rank among its peers."""
    metadata: PeerChannel
    """Among peers, in host memory: descriptions."""
    evidence: PeerChannel
    """Among peers, over the accelerator's own network where there is one: signatures and times."""

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        """Fill the tensor with what the peer at position ``source`` holds in its own."""
        ...
