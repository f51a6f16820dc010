"""What an earlier or running job has recorded about surfaces that do not repeat."""

from __future__ import annotations

from pathlib import Path

from torchscout.decision.record import EvidenceRecord
from torchscout.decision.recorder import Stamped, read
from torchscout.decision.repeatability import NONDETERMINISTIC

__all__ = ["not_repeating"]


def not_repeating(run_dir: Path) -> dict[str, str] | None:
    """The surfaces that were left out of comparisons, each with the latest reason; None without records."""
    files = sorted((run_dir / "records").glob("rank-*.jsonl"))
    found: dict[str, str] = {}
    for path in files:
        for line in read(path):
            item = line.item if isinstance(line, Stamped) else None
            if isinstance(item, EvidenceRecord) and (item.reason or "").startswith(NONDETERMINISTIC):
                found[item.surface] = str(item.reason)
    return found if files else None
