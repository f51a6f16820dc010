"""A campaign's table as Markdown, from its JSON document. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torchscout.cli.campaign.machine import caption

__all__ = ["markdown"]

_HEADS = (
    "fault",
    "ranks",
    "passed",
    "95% interval",
    "false positives",
    "wrong names",
    "missed",
    "fault to incident, median",
    "p95",
)


def markdown(report: Mapping[str, Any]) -> str:
    """Caption, table, and what was reduced, skipped or failed; ``report`` as `scout campaign` writes it."""
    lines = [caption(report) + ":", "", _line(_HEADS), "|---" * len(_HEADS) + "|"]
    lines += [_line(_figures(row)) for row in report["rows"]]
    notes = [f"- {row['title']}: {', '.join(row['reduced'])}." for row in report["rows"] if row["reduced"]]
    notes += [f"- {each}." for each in _skipped(report)]
    notes += [
        f"- Failed: `{each['cell'].rpartition('@')[0]}`: {each['reason']}." for each in report["failed"]
    ]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _figures(row: Mapping[str, Any]) -> list[str]:
    is_clean = row["row"].endswith("clean")
    all_passed = row["passed"] == row["run"] == row["cells"]
    passed = f"{row['passed']}/{row['run']}" + ("" if row["run"] == row["cells"] else f" (of {row['cells']})")
    return [
        row["title"],
        ", ".join(map(str, row["ranks"])),
        passed if all_passed else f"**{passed}**",
        " to ".join(f"{100 * each:.1f}" for each in row["interval"] or ()),
        str(row["false_alarms"]),
        "" if is_clean else str(row["wrong_names"]),
        "" if is_clean else str(row["missed"]),
        *("" if row[name] is None else f"{row[name]:.2f} s" for name in ("seconds_median", "seconds_p95")),
    ]


def _skipped(report: Mapping[str, Any]) -> list[str]:
    """By row and reason: a row may have hundreds of cells."""
    counted = Counter((each["row"], each["reason"]) for each in report["skipped"])
    return [f"Skipped, {count} of `{row}`: {reason}" for (row, reason), count in counted.items()]


def _line(texts: Any) -> str:
    return "| " + " | ".join(texts) + " |"
