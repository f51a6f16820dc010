"""The page that a person reads: what was found, on which machine, and what was covered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from rich.table import Table

from torchscout.decision.types import Manifestation
from torchscout.report.page import tables_markup, tables_page
from torchscout.utils.tables import stacked, table
from torchscout.utils.text import counted, listed

__all__ = ["html_page", "page"]

_FOUND_NOTHING = "nothing found"
_MOST_REASONS = 5


def page(report: Mapping[str, Any]) -> str:
    """Return the page of a report, in its JSON form. It is as wide as the terminal, if there is one."""
    parts: list[Table | str] = [_headline(report), ""]
    parts += [f"  {each['sentence']}" for each in report["incidents"]]
    parts += [f"  {reason}" for reason in report["reasons"]]
    if report["incidents"] or report["reasons"]:
        parts.append("")
    parts += [table(["machine", "ranks", "device", "found"], [*_machines(report)]), ""]
    parts += [table(["covered", "", "times"], [*_covered(report["coverage"])])]
    not_checked = report["coverage"]["not_checked"]
    parts += [f"Not checked: {name}: {why}" for name, why in [*not_checked.items()][:_MOST_REASONS]]
    if report["run_dir"] is not None:
        parts += ["", f"Evidence: {report['run_dir']}"]
    return stacked(parts)


def html_page(report: Mapping[str, Any]) -> str:
    """Return the same as one HTML file, in the style of the report of a run."""
    said = [*(each["sentence"] for each in report["incidents"]), *report["reasons"]]
    not_checked = [*report["coverage"]["not_checked"].items()]
    parts = [
        f"<p>{escape(_headline(report))}</p>",
        f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in said)}</ul>" if said else "",
        "<h2>Machines</h2>",
        tables_markup(["machine", "ranks", "device", "found"], _machines(report)),
        "<h2>Covered</h2>",
        tables_markup(["covered", "what", "times"], _covered(report["coverage"])),
    ]
    if not_checked:
        parts += ["<h2>Not checked</h2>", tables_markup(["what", "why"], not_checked)]
    return tables_page("scout preflight", "\n".join(parts))


def _headline(report: Mapping[str, Any]) -> str:
    size, hosts = len(report["devices"]), len({each["host"] for each in report["devices"]})
    what = {
        "healthy": "nothing was found",
        "faulty": f"{counted(len(report['ranks']), 'rank')} named",
        "undecided": "no decision",
    }[report["conclusion"]]
    return (
        f"Preflight of {counted(size, 'rank')} on {counted(hosts, 'machine')}: {what}, after "
        f"{counted(report['checks'], 'check')} in {report['seconds']:.0f} s."
    )


def _machines(report: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row for each machine."""
    faults: dict[int, list[str]] = {}
    for incident in report["incidents"]:
        doubt = "" if incident["named"] else "?"
        for rank in incident["ranks"]:
            faults.setdefault(rank, []).append(Manifestation(incident["manifestation"]).in_words + doubt)
    by_host: dict[str, list[Mapping[str, Any]]] = {}
    for device in report["devices"]:
        by_host.setdefault(device["host"], []).append(device)
    for host, devices in by_host.items():
        found = [
            f"rank {each['rank']}: {listed(dict.fromkeys(faults[each['rank']]))}"
            for each in devices
            if each["rank"] in faults
        ]
        ranks = listed((each["rank"] for each in devices), most=8)
        models = listed(dict.fromkeys(each["name"] for each in devices))
        yield [host, ranks, models, "; ".join(found) or _FOUND_NOTHING]


def _covered(coverage: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, times in coverage["layers"].items():
        yield ["layer", name.removeprefix("layers."), str(times)]
    for kind, counts in coverage["recipes"].items():
        if kind != "layer":
            visited = f"{counts['visited']} of {counted(counts['targets'], 'target')}"
            yield [kind.replace("_", " "), visited, str(counts["cycles"])]
    for kind, count in coverage["links"].items():
        yield ["link", f"{counted(count, kind)}: all-reduce, all-gather, all-to-all", ""]
