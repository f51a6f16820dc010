"""Which checkpoint a failed job goes back to: algorithm 3's retrieval half (paper, section 8).

A pure choice, with its reason in words. Finding the shards and loading them is for ``checkpoint``; the
full-catalog replay reaches this as a callable, and is not called where its answer could not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from torchscout.checkpoint.gate import CheckpointGate
from torchscout.checkpoint.generation import Generation, TrustLevel

__all__ = ["Failure", "Selection", "SweepResult", "confirm", "select_checkpoint"]


class Failure(str, Enum):
    """Why a checkpoint is needed."""

    SDC = "sdc"
    STRAGGLER = "straggler"
    HANG = "hang"
    MACHINES_GONE = "machines_gone"
    """A machine cannot be reached, and neither can its share of what is only in memory."""
    OTHER = "other"
    """A crash, an exception, a preemption."""


class SweepResult(str, Enum):
    """What a replay of the complete recipe catalog showed, job-wide."""

    CLEAN = "clean"
    SDC = "sdc"
    COULD_NOT_RUN = "could_not_run"


@dataclass(frozen=True, slots=True)
class Selection:
    """What every rank is to load."""

    role: TrustLevel | None
    """None: there is nothing that may be loaded, and a person decides whether to start from the beginning."""
    generation: Generation | None
    tentative: bool
    """Loaded only to be swept: before they train, the new workers replay the catalog and ``confirm``."""
    reason: str
    """The choice in one sentence."""
    is_swept: bool = False
    """Whether new workers replay the catalog before they train: nothing was found, and nobody has looked."""


def select_checkpoint(
    failure: Failure, gate: CheckpointGate, sweep: Callable[[], SweepResult] | None = None
) -> Selection:
    """What the job goes back to; ``sweep`` is None where trainers are blocked or gone, and cannot replay."""
    if why := _out_of_question(gate) or _DISTRUSTED.get(failure):
        return _verified(gate, why)
    if failure is Failure.STRAGGLER:
        return _latest(gate, "slowness does not touch the numbers")
    if sweep is not None:
        return confirm(gate, sweep())
    if gate.latest == gate.verified:
        same = _verified(gate, "it is the latest as well, so that a sweep could not change the choice")
        return replace(same, is_swept=True)
    return _latest(gate, "nobody could replay the catalog, so the next workers must before they train", True)


def confirm(gate: CheckpointGate, swept: SweepResult) -> Selection:
    """The choice once somebody tried to replay the whole catalog: who failed, or who loaded the latest."""
    if why := _out_of_question(gate) or _SWEPT.get(swept):
        return _verified(gate, why)
    return _latest(gate, "the sweep of the catalog was clean")


_DISTRUSTED = {
    Failure.SDC: "corruption was found",
    Failure.MACHINES_GONE: "a machine is gone, and what it held in memory cannot be inspected",
}
_SWEPT = {
    SweepResult.SDC: "the sweep of the catalog found corruption",
    SweepResult.COULD_NOT_RUN: "the sweep of the catalog did not complete",
}


def _out_of_question(gate: CheckpointGate) -> str | None:
    """Why the latest cannot be taken, whatever failed and whatever a sweep would say."""
    if gate.poisoned is not None:
        return f"corruption was found at step {gate.poisoned}"
    return "no newer state is in memory" if gate.latest is None else None


def _latest(gate: CheckpointGate, why: str, tentative: bool = False) -> Selection:
    how = "Tentatively take the latest" if tentative else "Take the latest"
    reason = f"{how} checkpoint, {gate.latest}: {why}."
    return Selection(TrustLevel.LATEST, gate.latest, tentative, reason, is_swept=tentative)


def _verified(gate: CheckpointGate, why: str) -> Selection:
    if gate.verified is None:
        reason = f"Nothing can be recovered: {why}, and no checkpoint was ever verified, or none is left."
        return Selection(None, None, False, reason)
    return Selection(
        TrustLevel.VERIFIED, gate.verified, False, f"Take the verified checkpoint, {gate.verified}: {why}."
    )
