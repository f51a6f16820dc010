"""What a session has found out on one rank, whatever framework it is attached to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchscout.decision.record import EvidenceRecord, Incident, Manifestation

__all__ = ["Findings"]


@dataclass(frozen=True, kw_only=True)
class Findings:
    records: list[EvidenceRecord] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    fired: int = 0
    """How many faults have happened."""

    @property
    def numbers(self) -> list[EvidenceRecord]:
        """Of all records, which tell of times too."""
        return [each for each in self.records if each.manifestation is Manifestation.SDC]

    @property
    def agreed(self) -> set[str]:
        return {each.surface for each in self.numbers if each.verdict is not None and each.verdict.agrees}

    @property
    def unchecked(self) -> dict[str, str | None]:
        return {each.surface: each.reason for each in self.numbers if each.verdict is None}
