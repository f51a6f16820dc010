"""Draws docs/images/simulation.svg from reports of `python -m evaluation simulate --json`.

    python tools/simulation_picture.py REPORT.json ...

A column for each report and a row for each family of faults: how many were decided rightly, not decided, and
decided wrongly. Reports of the same job, with other seeds, are one column. With ``--table`` it prints the
rows of the table in docs/results.md instead.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from torchscout.campaign.results import interval

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "simulation.svg"
_OUTCOMES = ("right", "inconclusive", "wrong")
_STYLE = """
    text { font: 13px sans-serif; fill: #22303c; }
    .small { font-size: 11px; fill: #4a5a68; }
    .middle { text-anchor: middle; }
    .right { fill: #4f7480; }
    .inconclusive { fill: #d7dfe3; }
    .wrong { fill: #c2410c; }
    .share { font-size: 11px; fill: #ffffff; }
    .dark { fill: #22303c; }
"""
_LEFT, _TOP, _COLUMN, _ROW, _BAR = 130, 74, 132, 22, 116


def main(arguments: list[str]) -> None:
    reports = merged([json.loads(Path(each).read_text()) for each in arguments if each != "--table"])
    if "--table" in arguments:
        print("\n".join(map(row_of, reports)))
    else:
        PICTURE.write_text(picture(reports))


def merged(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One report for each job. Times of several reports are the largest of their medians and p99."""
    jobs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for each in reports:
        jobs.setdefault((each["layout"], each["ranks"]), []).append(each)
    return [_one(each) for each in jobs.values()]


def _one(reports: list[dict[str, Any]]) -> dict[str, Any]:
    families: dict[str, Counter[str]] = {}
    for report in reports:
        for name, counts in report["families"].items():
            families.setdefault(name, Counter()).update(counts)
    scenarios, total = sum(each["scenarios"] for each in reports), sum(families.values(), Counter())
    whole = reports[0] | {
        "scenarios": scenarios,
        "families": families,
        "healthy_named_alone": sum(each["healthy_named_alone"] for each in reports),
        "seconds": {key: max(each["seconds"][key] for each in reports) for key in reports[0]["seconds"]},
        "memory_bytes": max(each["memory_bytes"] for each in reports),
    }
    for outcome in _OUTCOMES:
        whole[f"{outcome}_rate"] = total[outcome] / scenarios
        whole[f"{outcome}_interval"] = interval(total[outcome], scenarios)
    return whole


def picture(reports: list[dict[str, Any]]) -> str:
    """The grid as SVG."""
    families = list(dict.fromkeys(name for each in reports for name in each["families"]))
    width, height = _LEFT + _COLUMN * len(reports) + 10, _TOP + _ROW * (len(families) + 1) + 42
    title = "Simulated faults that were decided rightly, by layout and family"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
        f"  <title>{title}</title>\n  <style>{_STYLE}  </style>",
        f'  <rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'  <text x="14" y="24">{title}</text>',
    ]
    for place, report in enumerate(reports):
        x = _LEFT + _COLUMN * place
        parts.append(f'  <text class="middle" x="{x + _BAR // 2}" y="48">{report["layout"]}</text>')
        counted = f"{report['ranks']:,} ranks, {report['scenarios']:,}"
        parts.append(f'  <text class="small middle" x="{x + _BAR // 2}" y="64">{counted}</text>')
        total = {
            outcome: sum(counts.get(outcome, 0) for counts in report["families"].values())
            for outcome in _OUTCOMES
        }
        for row, counts in enumerate([total, *(report["families"].get(name, {}) for name in families)]):
            parts += _bar(x, _TOP + _ROW * row, counts)
    for row, name in enumerate(["all", *families]):
        parts.append(f'  <text x="14" y="{_TOP + _ROW * row + 14}">{name}</text>')
    parts += _key(height - 14)
    return "\n".join([*parts, "</svg>", ""])


def _bar(x: int, y: int, counts: dict[str, int]) -> list[str]:
    total = sum(counts.values())
    if not total:
        return []
    parts, at = [], float(x)
    for outcome in _OUTCOMES:
        size = _BAR * counts.get(outcome, 0) / total
        if size:
            parts.append(
                f'  <rect class="{outcome}" x="{at:.1f}" y="{y}" width="{max(size, 2):.1f}" height="18"/>'
            )
        at += size
    share = 100 * counts.get("right", 0) / total
    shade = "share" if share >= 40 else "share dark"
    parts.append(f'  <text class="{shade}" x="{x + 5}" y="{y + 13}">{share:.3g}%</text>')
    return parts


def _key(y: int) -> list[str]:
    parts = []
    for place, outcome in enumerate(_OUTCOMES):
        x = _LEFT + 92 * place
        parts.append(f'  <rect class="{outcome}" x="{x}" y="{y - 11}" width="14" height="14"/>')
        parts.append(f'  <text class="small" x="{x + 20}" y="{y}">{outcome}</text>')
    return parts


def row_of(report: dict[str, Any]) -> str:
    """A row of the table: rates with 95% intervals, processor time of a round, memory."""
    rates = []
    for outcome in ("right", "wrong", "inconclusive"):
        low, high = (100 * each for each in report[f"{outcome}_interval"])
        rates.append(f"{100 * report[f'{outcome}_rate']:.2f}% ({low:.2f} to {high:.2f})")
    seconds = report["seconds"]
    cells = [
        f"`{report['layout']}`, {report['ranks']:,}",
        f"{report['scenarios']:,}",
        *rates,
        str(report["healthy_named_alone"]),
        f"{seconds['median']:.3f} s, {seconds['p99']:.3f} s",
        f"{report['memory_bytes'] / 2**20:,.0f} MiB",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
