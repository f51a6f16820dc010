"""The doctor's findings as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchscout.cli.checkpoint.wording import counted, stacked, table
from torchscout.cli.doctor.finding import Finding, Grade

__all__ = ["screen"]


def screen(findings: Sequence[Finding], counts: Mapping[Grade, int]) -> str:
    rows: list[list[str]] = []
    for each in findings:
        rows.append([each.status.value, each.name, each.what])
        if each.fix is not None:
            rows.append(["", "", f"-> {each.fix}"])
    return stacked([table(["status", "check", "found"], rows), "", _summary(counts)])


def _summary(counts: Mapping[Grade, int]) -> str:
    failed, warned = counts[Grade.FAIL], counts[Grade.WARN]
    worth = f"{counted(warned, 'warning')}." if warned else ""
    if failed:
        return (
            f"{counted(failed, 'check')} failed: do what the arrows say before a long run. {worth}".rstrip()
        )
    return f"This machine is fit for a long run. {worth}".rstrip()
