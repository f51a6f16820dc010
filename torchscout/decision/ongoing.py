"""Which incidents are news: a wrong weight stays wrong at every check, and saying so once is enough."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torchscout.decision.record import EvidenceRecord, Incident

__all__ = ["Ongoing"]


class Ongoing:
    """The incidents of replay that have been reported and have not been seen to end."""

    def __init__(self) -> None:
        self._open: dict[Hashable, EvidenceRecord] = {}

    def news(self, incidents: Sequence[Incident], records: Sequence[EvidenceRecord]) -> list[Incident]:
        """Those of one check that were not reported yet; ``records`` are all of that check.

        What was reported ends with the first check that compares the like of it, if only in another layer,
        and does not name the same ranks again; it is news when it comes back.
        """
        still = {_key(incident) for incident in incidents}
        self._open = {
            key: deciding
            for key, deciding in self._open.items()
            if key in still or not _passed(deciding, records)
        }
        fresh = [incident for incident in incidents if _key(incident) not in self._open]
        self._open |= {_key(incident): incident.records[0] for incident in fresh}
        return fresh


def _key(incident: Incident) -> Hashable:
    return incident.manifestation, incident.scope, incident.ranks


def _passed(deciding: EvidenceRecord, records: Sequence[EvidenceRecord]) -> bool:
    """Whether the like of what the incident was about has been compared, and peers agreed."""
    alike = [each.verdict for each in records if each.mode == deciding.mode]
    return any(verdict is not None and verdict.agrees for verdict in alike)
