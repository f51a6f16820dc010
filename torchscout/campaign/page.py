"""A campaign as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from torchscout.campaign.ablation.variants import HEADS as ABLATION_HEADS
from torchscout.campaign.ablation.variants import figures as ablation_figures
from torchscout.campaign.machine import caption
from torchscout.campaign.tables import HEADS, figures

__all__ = ["page"]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: .4rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
td small { color: #555; display: block; }
.passed { color: #0a6b2e; font-weight: 600; }
.failed { color: #b00020; font-weight: 600; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #e6e6e6; }
  td small { color: #aaa; }
  th, td { border-color: #333; }
  .passed { color: #6fd08c; }
  .failed { color: #ff8a80; }
}
"""
_RULE = (
    "A cell passes only if manifestation, ranks, scope and surface are right and nothing else was reported."
)


def page(report: Mapping[str, Any]) -> str:
    """The page of a report that ``results.as_report`` has made."""
    outcome = "Every cell has passed." if report["passed"] else f"{len(report['failed'])} cells have failed."
    place = caption(report) if "device" in report else f"Seed {report['seed']}"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>scout campaign {escape(report['campaign'])}</title><style>{_STYLE}</style></head><body>",
            f"<h1>scout campaign {escape(report['campaign'])}</h1>",
            f"<p>{escape(place)}. {outcome} {_RULE}</p>",
            *([_ablations(report["ablations"]), "<h2>Cells</h2>"] if "ablations" in report else []),
            _table(HEADS, map(_row, report["rows"])),
            *_listed("What failed", report["failed"]),
            *_listed("What was skipped", report.get("skipped", ())),
            "</body></html>",
        ]
    )


def _table(heads: Sequence[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{each.capitalize()}</th>" for each in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


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
