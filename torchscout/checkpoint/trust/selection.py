"""Selects the checkpoint that a failed job loads: the retrieval half of algorithm 3 (paper, section 8).

A pure decision, with its reason in words. ``checkpoint.resume`` finds and loads the shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from torchscout.checkpoint.trust.gate import CheckpointGate
from torchscout.checkpoint.trust.generation import Generation, TrustLevel
from torchscout.decision.types import Failure

__all__ = ["Selection", "SweepResult", "confirm", "select_checkpoint"]


class SweepResult(str, Enum):
    """The job-wide result of replaying the complete recipe catalog."""

    CLEAN = "clean"
    SDC = "sdc"
    COULD_NOT_RUN = "could_not_run"


@dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoint that every rank loads."""

    role: TrustLevel | None
    """None if no checkpoint may be loaded."""
    generation: Generation | None
    tentative: bool
    """Whether the new workers must replay the catalog and call ``confirm`` before they train."""
    reason: str
    """Why, in one sentence."""
    is_swept: bool = False
    """Whether the new workers replay the catalog before they train, because nobody has done so since."""


def select_checkpoint(failure: Failure, gate: CheckpointGate) -> Selection:
    """Select the checkpoint to load after this failure, when trainers are blocked or gone."""
    if why := _out_of_question(gate) or _DISTRUSTED.get(failure):
        # The machine that computed wrong numbers may not have been named, and run this job again.
        return replace(_verified(gate, why), is_swept=failure is Failure.SDC)
    if failure is Failure.STRAGGLER:
        return _latest(gate, "slowness does not affect the numbers")
    if gate.latest == gate.verified:
        same = _verified(gate, "it is also the latest, so a sweep could not change the choice")
        return replace(same, is_swept=True)
    return _latest(
        gate, "the catalog has not been replayed, so the next workers must replay it before they train", True
    )


def confirm(gate: CheckpointGate, swept: SweepResult) -> Selection:
    """Select the checkpoint to train from, given the result of a sweep."""
    if why := _out_of_question(gate) or _SWEPT.get(swept):
        return _verified(gate, why)
    return _latest(gate, "the sweep of the catalog was clean")


_DISTRUSTED = {
    Failure.SDC: "corruption was found",
    Failure.MACHINES_GONE: "a machine is gone, and the state in its memory cannot be inspected",
}
_SWEPT = {
    SweepResult.SDC: "the sweep of the catalog found corruption",
    SweepResult.COULD_NOT_RUN: "the sweep of the catalog did not complete",
}


def _out_of_question(gate: CheckpointGate) -> str | None:
    """Why the latest cannot be selected, whatever a sweep would find; None if it can."""
    if gate.poisoned is not None:
        return f"corruption was found at step {gate.poisoned}"
    return "no newer state is in memory" if gate.latest is None else None


def _latest(gate: CheckpointGate, why: str, tentative: bool = False) -> Selection:
    how = "Tentatively take the latest" if tentative else "Take the latest"
    reason = f"{how} checkpoint, {gate.latest}: {why}."
    return Selection(TrustLevel.LATEST, gate.latest, tentative, reason, is_swept=tentative)


def _verified(gate: CheckpointGate, why: str) -> Selection:
    if gate.verified is None:
        reason = f"Nothing can be recovered: {why}, and no verified checkpoint is left."
        return Selection(None, None, False, reason)
    return Selection(
        TrustLevel.VERIFIED, gate.verified, False, f"Take the verified checkpoint, {gate.verified}: {why}."
    )
