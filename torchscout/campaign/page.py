"""A campaign as one self-contained HTML page, in the style of the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from torchscout.campaign.ablation.variants import HEADS as ABLATION_HEADS
from torchscout.campaign.ablation.variants import figures as ablation_figures
from torchscout.campaign.machine import caption
from torchscout.campaign.tables import HEADS, figures
from torchscout.report.page import tables_page

__all__ = ["page"]

_RULE = (
    "A cell passes only if manifestation, ranks, scope and surface are right and nothing else was reported."
)


def page(report: Mapping[str, Any]) -> str:
    """The page of a report that ``results.as_report`` has made."""
    outcome = "Every cell has passed." if report["passed"] else f"{len(report['failed'])} cells have failed."
    place = caption(report) if "device" in report else f"Seed {report['seed']}"
    parts = [
        f"<p>{escape(place)}. {outcome} {_RULE}</p>",
        *([_ablations(report["ablations"]), "<h2>Cells</h2>"] if "ablations" in report else []),
        _table(HEADS, map(_row, report["rows"])),
        *_listed("What failed", report["failed"]),
        *_listed("What was skipped", report.get("skipped", ())),
    ]
    return tables_page(f"scout campaign {report['campaign']}", "\n".join(parts))


def _table(heads: Sequence[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{each.capitalize()}</th>" for each in heads)
    return (
        f'<div class="scroll"><table class="figures"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(row: Mapping[str, Any]) -> str:
    title, ranks, passed, *rest = map(escape, figures(row))
    kind = "passed" if row["passed"] == row["run"] else "failed"
    about = escape("; ".join([row["trigger"], *row["reduced"]]))
    return (
        f"<tr><td>{title}<small>{about}</small></td><td>{ranks}</td>"
        f'<td class="{kind}">{passed}</td>{"".join(f"<td>{each}</td>" for each in rest)}</tr>'
    )


def _ablations(rows: Sequence[Mapping[str, Any]]) -> str:
    return _table(ABLATION_HEADS, map(_ablation, rows))


def _ablation(row: Mapping[str, Any]) -> str:
    title, *rest = map(escape, ablation_figures(row))
    head = f"<td>{title}<small>instead: {escape(row['instead'])}</small></td>"
    return f"<tr>{head}{''.join(f'<td>{each}</td>' for each in rest)}</tr>"


def _listed(title: str, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    if not cells:
        return []
    items = [f"<li><b>{escape(each['cell'])}</b>: {escape(each['reason'])}</li>" for each in cells]
    return [f"<h2>{title}</h2><ul>", *items, "</ul>"]
