"""What a session has found on one rank, whatever framework it is attached to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchscout.config import ReplayConfig
from torchscout.decision.types import EvidenceRecord, Incident, Manifestation
from torchscout.run.reader import Stamped, read
from torchscout.session.session import Session


@dataclass(frozen=True, kw_only=True)
class Findings:
    records: list[EvidenceRecord] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    fired: int = 0
    """How many faults have happened."""

    @property
    def replay(self) -> dict[str, Any]:
        """The status of replay before the session was closed."""
        return self.status["replay"]

    @property
    def numbers(self) -> list[EvidenceRecord]:
        """The records of comparisons of numbers, without those of times."""
        return [each for each in self.records if each.manifestation is Manifestation.SDC]

    @property
    def agreed(self) -> set[str]:
        return {each.surface for each in self.numbers if each.verdict is not None and each.verdict.agrees}

    @property
    def unchecked(self) -> dict[str, str | None]:
        return {each.surface: each.reason for each in self.numbers if each.verdict is None}


def evidence_of(run_dir: Path, rank: int) -> list[EvidenceRecord]:
    """Return all comparisons that a rank has recorded."""
    path = run_dir / "records" / f"rank-{rank}.jsonl"
    items = [line.item for line in read(path) if isinstance(line, Stamped)] if path.exists() else []
    return [item for item in items if isinstance(item, EvidenceRecord)]


def findings_of(session: Session) -> dict[str, Any]:
    """Close a session on every rank, and return the arguments of :class:`Findings`."""
    dist.barrier()  # the rank that reports an incident has written it
    incidents, status = list(session.incidents), dict(session.status())
    session.close()
    records = evidence_of(session.run_dir, dist.get_rank())
    return {"records": records, "incidents": incidents, "failures": list(session.failures), "status": status}


def all_records(replay: ReplayConfig | None) -> ReplayConfig | None:
    """Return the same settings, with every comparison recorded."""
    return None if replay is None else replace(replay, records="all")
