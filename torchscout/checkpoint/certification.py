"""What every rank votes at the end of a check, and what the job concludes from it (paper, sections 8 and 9).

Votes are combined across the job before anything moves: each rank casts a ballot of whole numbers, the
highest of each counts, and from that all ranks derive the same events for the gate. Pure: nothing is
exchanged here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torchscout.checkpoint.gate_state import (
    Checked,
    CheckpointGate,
    Event,
    Lost,
    Outcome,
    Sealed,
    WriteFailed,
    Written,
)
from torchscout.decision.record import EvidenceRecord, Incident, Manifestation
from torchscout.decision.repeatability import REFUSED, UNDECIDED, unmet
from torchscout.decision.sdc import FAILED
from torchscout.errors import CheckpointError

__all__ = ["SEVERITY", "CheckVote", "events_of", "outcome_of"]

SEVERITY = (Outcome.HEALTHY, Outcome.STRAGGLER, Outcome.NOT_CHECKED, Outcome.REJECTED, Outcome.SDC)
"""The worst that any rank has seen is the job's."""


def outcome_of(
    records: Sequence[EvidenceRecord],
    incidents: Collection[Incident],
    targets: Collection[str],
    require: Collection[str] = (),
) -> Outcome:
    """One rank's view of a check; ``targets`` are what was due on it.

    Each of them must have been compared, or be one that replay does not repeat at all, such as an update that
    communicates; state in general, the target without a name, must have been compared. ``records`` are those
    that are kept: what a nondeterministic kernel computed has no verdict, and neither has what a rank failed
    to compute. A check may be accepted without a surface that no rank has (a parameter without a gradient)
    or that does not repeat, unless it is among ``require``; see ``ReplayConfig.require``.
    """
    numbers = [each for each in records if each.manifestation is Manifestation.SDC]
    if any(each.scope is not None for each in numbers):
        return Outcome.SDC
    if _has(numbers, UNDECIDED):
        return Outcome.REJECTED
    compared = {each.layer or "" for each in numbers if each.verdict is not None}
    compared |= {each.layer for each in numbers if each.layer and _begins(each, REFUSED)}
    if _has(numbers, FAILED) or not set(targets) <= compared or unmet(numbers, require):
        return Outcome.NOT_CHECKED
    slow = any(each.manifestation is Manifestation.STRAGGLER for each in incidents)
    return Outcome.STRAGGLER if slow else Outcome.HEALTHY


def _has(records: Sequence[EvidenceRecord], reason: str) -> bool:
    return any(_begins(each, reason) for each in records)


def _begins(record: EvidenceRecord, reason: str) -> bool:
    return record.reason is not None and record.reason.startswith(reason)


@dataclass(frozen=True, slots=True)
class CheckVote:
    """What one rank brings to the vote."""

    outcome: Outcome
    accepted: int
    """Where its gate's cycle stands."""
    lost: bool = False
    """The latest capture came to nothing here."""
    writing: bool = False
    """The files that are due are not sealed here yet."""
    unwritten: bool = False
    """They could not be written here."""

    def votes(self) -> list[int]:
        """To be combined by taking the highest of each."""
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
        """The job's; a ``CheckpointError``, the same on every rank, if ranks are in different cycles."""
        severity, accepted, negated, lost, writing, unwritten = highest
        if accepted != -negated:
            raise CheckpointError(
                f"ranks disagree about the cycle of checks: some have accepted {-negated} of it, "
                f"others {accepted}; no checkpoint is touched"
            )
        return cls(SEVERITY[severity], accepted, bool(lost), bool(writing), bool(unwritten))


def events_of(gate: CheckpointGate, step: int, counted: CheckVote) -> list[Event]:
    """What has happened since the last check, in order, and the check itself."""
    events: list[Event] = []
    if gate.pending is not None:
        events.append(Lost(gate.pending) if counted.lost else Sealed(gate.pending))
    if gate.writing is not None:
        if counted.unwritten:
            events.append(WriteFailed(gate.writing))
        elif not counted.writing:
            events.append(Written(gate.writing))
    return [*events, Checked(step, counted.outcome)]
