"""Combines all ranks' votes on a check into events for the gate (paper, sections 8 and 9).

Each rank votes with a list of integers; the maximum of each over all ranks counts, so that all ranks derive
the same events. ``CertifiedSteps`` tracks the newest certified step for checkpoints that the job writes
itself. Nothing is communicated here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torchscout.checkpoint.trust.gate_state import (
    Checked,
    CheckpointGate,
    Event,
    Lost,
    Outcome,
    Sealed,
    WriteFailed,
    Written,
)
from torchscout.decision.repeatability import REFUSED, UNDECIDED, unmet
from torchscout.decision.sdc import FAILED
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation
from torchscout.errors import CheckpointError

__all__ = ["SEVERITY", "CheckVote", "events_of", "outcome_of"]

SEVERITY = (Outcome.HEALTHY, Outcome.STRAGGLER, Outcome.NOT_CHECKED, Outcome.REJECTED, Outcome.SDC)
"""From best to worst; the worst outcome on any rank is the job's."""


def outcome_of(
    records: Sequence[EvidenceRecord],
    incidents: Collection[Incident],
    targets: Collection[str],
    require: Collection[str] = (),
) -> Outcome:
    """Return one rank's outcome of a check of these ``targets``.

    Every target must have been compared, or be one that replay cannot repeat, such as an update that
    communicates; the unnamed target, state in general, must have been compared. Records of nondeterministic
    kernels and of failed replays have no verdict. A check may be accepted without a surface that no rank has
    (a parameter without a gradient) or that does not repeat, unless ``require`` names it; see
    ``ReplayConfig.require``.
    """
    numbers = [each for each in records if each.manifestation is Manifestation.SDC]
    if any(each.scope is not None for each in numbers):
        return Outcome.SDC
    if any(_begins(each, UNDECIDED) for each in numbers):
        return Outcome.REJECTED
    compared = {each.layer or "" for each in numbers if each.verdict is not None}
    compared |= {each.layer for each in numbers if each.layer and _begins(each, REFUSED)}
    failed = any(_begins(each, FAILED) for each in numbers)
    if failed or not set(targets) <= compared or unmet(numbers, require):
        return Outcome.NOT_CHECKED
    slow = any(each.manifestation is Manifestation.STRAGGLER for each in incidents)
    return Outcome.STRAGGLER if slow else Outcome.HEALTHY


def _begins(record: EvidenceRecord, reason: str) -> bool:
    return record.reason is not None and record.reason.startswith(reason)


@dataclass(frozen=True, slots=True)
class CheckVote:
    """One rank's vote at the end of a check."""

    outcome: Outcome
    accepted: int
    """Its gate's ``accepted``."""
    lost: bool = False
    """The pending generation could not be captured on this rank."""
    writing: bool = False
    """This rank has not sealed the files that are due yet."""
    unwritten: bool = False
    """This rank could not write them."""

    def votes(self) -> list[int]:
        """The vote as integers, to be combined by taking the maximum of each."""
        return [
            SEVERITY.index(self.outcome),
            self.accepted,
            -self.accepted,
            int(self.lost),
            int(self.writing),
            int(self.unwritten),
        ]

    @classmethod
    def counted(cls, highest: Sequence[int]) -> CheckVote:
        """The job's vote; raises ``CheckpointError`` on every rank if ranks are in different cycles."""
        severity, accepted, negated, lost, writing, unwritten = highest
        if accepted != -negated:
            raise CheckpointError(
                f"ranks disagree about the current cycle: some have accepted {-negated} of its checks, "
                f"others {accepted}; no checkpoint was changed"
            )
        return cls(SEVERITY[severity], accepted, bool(lost), bool(writing), bool(unwritten))


def events_of(gate: CheckpointGate, step: int, counted: CheckVote, recipes: int = 1) -> list[Event]:
    """The events since the last check, in order, and the check itself, which has replayed so many recipes.

    An accepted check without any certifies nothing, and is left out.
    """
    events: list[Event] = []
    if gate.pending is not None:
        events.append(Lost(gate.pending) if counted.lost else Sealed(gate.pending))
    if gate.writing is not None:
        if counted.unwritten:
            events.append(WriteFailed(gate.writing))
        elif not counted.writing:
            events.append(Written(gate.writing))
    if recipes or not counted.outcome.accepted:
        events.append(Checked(step, counted.outcome, recipes))
    return events
