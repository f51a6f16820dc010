"""Compares the state that replicas have captured for checkpoints: a copy can be corrupted on its way (paper,
section 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torchscout.c3 import compare as c3
from torchscout.communicators import PeerCommunicator
from torchscout.decision.types import EvidenceRecord
from torchscout.mesh import Axis, LayerKind
from torchscout.replay.recipe import ABSENT, Comparison, Mode
from torchscout.replay.verdicts import Context, judge
from torchscout.session.checkpoints.certifier import Certifier

__all__ = ["CAPTURED", "CaptureComparison"]

CAPTURED = "state/checkpoint"
"""The surface of the replicated state that was captured for checkpoints."""


class CaptureComparison:
    """This rank's captured state among that of its replicas."""

    def __init__(
        self,
        peers: Callable[[LayerKind, bool], PeerCommunicator],
        certifier: Certifier,
        guard: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """``peers`` as in ``ReplayParts``; ``guard`` returns None if a function raises."""
        self._certifier, self._guard = certifier, guard
        self._replicas = _replicas_of_all(peers)

    def records(self, step: int) -> list[EvidenceRecord]:
        """Compare what was captured after the previous check. Every rank makes this call in every check."""
        peers = self._replicas
        if peers is None or not self._certifier.captures:
            return []
        own = self._guard(self._certifier.signature)
        found = c3.compare(peers.evidence, {CAPTURED: ABSENT if own is None else own})[CAPTURED]
        if ABSENT in found.evidence:
            return []
        context, gathered = Context(step, peers.group.ranks, ""), cast("Sequence[int]", found.evidence)
        return judge(context, [Comparison(CAPTURED, Mode.STATE)], {CAPTURED: gathered})


def _replicas_of_all(peers: Callable[[LayerKind, bool], PeerCommunicator]) -> PeerCommunicator | None:
    """Return the peers that hold the same state, experts included; None where there are none to compare
    with."""
    dense, replicas = peers(LayerKind.DENSE, False), peers(LayerKind.EXPERT, False)
    group = replicas.group
    is_replica_of_all = {*group.ranks} <= {*dense.group.ranks} and group.axis is not Axis.SHARD
    return replicas if is_replica_of_all and group.can_compare else None
