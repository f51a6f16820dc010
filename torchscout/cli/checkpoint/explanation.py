"""`scout checkpoint explain`: what a recovery would choose after a failure, and why (paper, section 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchscout.checkpoint.gate_state import CheckpointGate
from torchscout.checkpoint.selection import Failure, Selection, SweepResult, confirm, select_checkpoint
from torchscout.cli.checkpoint.contents import Contents, memory_beside
from torchscout.cli.checkpoint.examination import Broken, Damage, broken_lines, usable
from torchscout.cli.checkpoint.listing import as_json, heading
from torchscout.cli.checkpoint.wording import stacked

__all__ = ["explanation"]

_AFTER = {
    Failure.SDC: "corruption",
    Failure.HANG: "a hang",
    Failure.MACHINES_GONE: "a lost machine",
    Failure.STRAGGLER: "a straggler",
    Failure.OTHER: "a crash",
}


def explanation(contents: Contents, damaged: Sequence[Damage]) -> tuple[dict[str, Any], str]:
    """The document and the screen."""
    named = contents.gate
    gate, broken = usable(contents, named or CheckpointGate(), damaged)
    report = {
        "job": contents.job,
        "world_size": contents.world_size,
        "has_ledger": named is not None,
        "poisoned": gate.poisoned,
        "coverage": contents.coverage,
        "unusable": [each.to_json() for each in broken],
        "decisions": [_decided(failure, gate) for failure in _AFTER],
    }
    return report, _screen(contents, report, broken)


def _decided(failure: Failure, gate: CheckpointGate) -> dict[str, Any]:
    decision = select_checkpoint(failure, gate)
    otherwise = _as_json(confirm(gate, SweepResult.SDC)) if decision.tentative else None
    return {"failure": failure.value, **_as_json(decision), "otherwise": otherwise}


def _as_json(decision: Selection) -> dict[str, Any]:
    return {
        "role": None if decision.role is None else decision.role.value,
        "generation": None if decision.generation is None else as_json(decision.generation),
        "tentative": decision.tentative,
        "reason": decision.reason,
    }


def _screen(contents: Contents, report: dict[str, Any], broken: Sequence[Broken]) -> str:
    lines = [*heading(contents), ""]
    if not report["has_ledger"]:
        lines += ["No ledger is here: nobody has written down which generations may be trusted.", ""]
    if report["coverage"]:
        lines += [f"Checks cover: {report['coverage']}", ""]
    lines += broken_lines(broken, contents.world_size)
    for failure, decided in zip(_AFTER.values(), report["decisions"], strict=True):
        lines += [f"After {failure}:", f"  {decided['reason']}"]
        if decided["otherwise"]:
            lines.append(f"  If they find corruption: {decided['otherwise']['reason']}")
    lines += ["", "Only what lies in these folders was considered."]
    if (memory := memory_beside(contents)) is not None:
        lines.append(f"This machine's memory has more of this job: {memory}")
    return stacked(lines)
