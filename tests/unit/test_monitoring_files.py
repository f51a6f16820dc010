"""The alert rules and the dashboard are valid, and use metrics that the exporter has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from torchscout.decision.consensus.rules import Status
from torchscout.decision.records.record import NOT_CHECKED, Manifestation, Scope
from torchscout.metrics.samples import METRICS

FOLDER = Path(__file__).parents[2] / "monitoring"
ALERTS, DASHBOARD = FOLDER / "alerts.yml", FOLDER / "dashboard.json"
COMMON = {"run", "rank"}
LABELS = {
    "torchscout_incidents_total": COMMON | {"manifestation", "scope"},
    "torchscout_verdicts_total": COMMON | {"manifestation", "status"},
    "torchscout_generation_step": COMMON | {"level"},
    "torchscout_coverage_targets": COMMON | {"recipe"},
    "torchscout_coverage_cycles": COMMON | {"recipe"},
}
VALUES = {
    "manifestation": {each.value for each in Manifestation},
    "scope": {each.value for each in Scope},
    "status": {*(each.value for each in Status), NOT_CHECKED},
}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def expressions() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [*(rule["expr"] for rule in rules()), *shown]


def selectors(expression: str) -> Iterator[tuple[str, list[Any]]]:
    """Every metric of a PromQL expression with the matchers of its labels; raises for invalid ones."""
    tree = promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, promql_parser.VectorSelector):
            yield node.name, node.matchers.matchers
        for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "args", "param"):
            child = getattr(node, name, None)
            waiting += child if isinstance(child, list) else [] if child is None else [child]


def metrics_of(expression: str) -> set[str]:
    return {name for name, _ in selectors(expression)}


def test_the_metrics_of_an_expression_are_found():
    assert metrics_of("max by (a) (increase(x_total[5m])) / (y > 0) or topk(3, z)") == {"x_total", "y", "z"}
    with pytest.raises(ValueError, match="unclosed"):
        metrics_of("max by (a) (x")


@pytest.mark.parametrize("expression", expressions())
def test_expressions_use_metrics_and_labels_that_are_exported(expression: str):
    assert metrics_of(expression) == {*re.findall(r"torchscout_\w+", expression)}
    for name, matchers in selectors(expression):
        assert name in METRICS
        labels = LABELS.get(name, COMMON)
        for each in matchers:
            assert each.name in labels
            assert each.value in VALUES.get(each.name, {each.value})
    for _, names in re.findall(r"(by|without) \(([^)]*)\)", expression):
        every = set[str]().union(*(LABELS.get(each, COMMON) for each in metrics_of(expression)))
        assert {each.strip() for each in names.split(",")} <= every


def test_rates_are_taken_of_counters_only():
    found = [re.findall(r"(?:rate|increase)\((\w+)", each) for each in expressions()]
    rated = {name for names in found for name in names}
    assert rated
    assert {METRICS[name].kind for name in rated} == {"counter"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_say_what_they_mean(rule: dict[str, Any]):
    assert {*rule} <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert {*rule["annotations"]} == {"summary", "description"}
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))
    text = " ".join(rule["annotations"].values())
    grouped = re.search(r"by \(([^)]*)\)", rule["expr"])
    kept = COMMON if grouped is None else {each.strip() for each in grouped[1].split(",")}
    assert {*re.findall(r"\$labels\.(\w+)", text)} <= kept


def test_alerts_have_different_names_and_cover_every_kind_of_incident():
    names = [rule["alert"] for rule in rules()]
    assert len({*names}) == len(names)
    text = ALERTS.read_text()
    assert all(f'manifestation="{each}"' in text for each in ("sdc", "hang", "straggler"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_alert_rules():
    done = subprocess.run(["promtool", "check", "rules", ALERTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def test_the_dashboard_has_what_grafana_needs():
    dashboard = json.loads(DASHBOARD.read_text())
    assert (dashboard["title"], dashboard["uid"]) == ("torchscout", "torchscout")
    assert dashboard["schemaVersion"] >= 36
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    assert {*re.findall(r"\$\{?([a-z]\w+)", DASHBOARD.read_text())} == variables
    assert len({panel["id"] for panel in panels()}) == len(panels()) == len({p["title"] for p in panels()})
    for panel in panels():
        assert panel["type"] in {"timeseries", "stat"}
        assert panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert [each["refId"] for each in panel["targets"]] == [*"ABCDEFG"][: len(panel["targets"])]


def test_panels_of_the_dashboard_do_not_overlap():
    places = [panel["gridPos"] for panel in panels()]
    assert all(each["x"] + each["w"] <= 24 for each in places)
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
