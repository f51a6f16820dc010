"""Incidents that tests make up."""

from __future__ import annotations

from torchscout.decision.types import Action, EvidenceRecord, Incident, Scope


def incident_from(
    record: EvidenceRecord,
    ranks: tuple[int, ...],
    *,
    scope: Scope = Scope.RANK,
    action: Action = Action.RESTART,
    sentence: str = "a sentence",
) -> Incident:
    """Return an incident about one record, of the same step and manifestation."""
    return Incident(
        manifestation=record.manifestation,
        scope=scope,
        step=record.step,
        ranks=ranks,
        hosts=(),
        records=(record,),
        action=action,
        sentence=sentence,
    )
