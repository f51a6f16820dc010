"""A campaign as one HTML page that needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torchscout.campaign.ablation.variants import HEADS as ABLATION_HEADS
from torchscout.campaign.ablation.variants import figures
from torchscout.campaign.machine import caption

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
_HEADS = (
    "Fault",
    "Ranks",
    "Passed",
    "95% interval",
    "False positives",
    "Wrong names",
    "Missed",
    "Fault to incident, median",
    "p95",
)


def page(report: Mapping[str, Any]) -> str:
    """``report`` as ``summary.as_report`` makes it."""
    outcome = "Every cell has passed." if report["passed"] else f"{len(report['failed'])} cells have failed."
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>scout campaign {escape(report['campaign'])}</title><style>{_STYLE}</style></head><body>",
            f"<h1>scout campaign {escape(report['campaign'])}</h1>",
            f"<p>{escape(_on(report))}. {outcome} {_RULE}</p>",
            *([_ablations(report["ablations"])] if "ablations" in report else []),
            _table(report["rows"]),
            *_listed("What failed", report["failed"]),
            *_listed("What was skipped", report.get("skipped", ())),
            "</body></html>",
        ]
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(map(_row, rows))}</tbody></table>"


def _ablations(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = "".join(f"<th>{head.capitalize()}</th>" for head in ABLATION_HEADS)
    body = "".join(map(_ablation, rows))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table><h2>Cells</h2>"


def _ablation(row: Mapping[str, Any]) -> str:
    title, *rest = figures(row)
    told = f"<td>{escape(title)}<small>instead: {escape(row['instead'])}</small></td>"
    return f"<tr>{told}{''.join(f'<td>{escape(each)}</td>' for each in rest)}</tr>"


def _row(row: Mapping[str, Any]) -> str:
    under = "; ".join([row["trigger"], *row["reduced"]])
    title = f"<td>{escape(row['title'])}<small>{escape(under)}</small></td>"
    ranks = f"<td>{', '.join(map(str, row['ranks']))}</td>"
    kind = "passed" if row["passed"] == row["run"] else "failed"
    low, high = row["interval"] or (0.0, 1.0)
    figures = [
        f'<td class="{kind}">{row["passed"]}/{row["run"]}</td>',
        f"<td>{100 * low:.1f} to {100 * high:.1f} %</td>",
        *(f"<td>{row[name]}</td>" for name in ("false_alarms", "wrong_names", "missed")),
        *(f"<td>{_seconds(row[name])}</td>" for name in ("seconds_median", "seconds_p95")),
    ]
    return f"<tr>{title}{ranks}{''.join(figures)}</tr>"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _on(report: Mapping[str, Any]) -> str:
    return caption(report) if "device" in report else f"Seed {report['seed']}"


def _listed(title: str, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    if not cells:
        return []
    told = [f"<li><b>{escape(each['cell'])}</b>: {escape(each['reason'])}</li>" for each in cells]
    return [f"<h2>{title}</h2><ul>", *told, "</ul>"]
