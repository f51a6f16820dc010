"""The alert rules and the dashboard use metrics and labels that the exporter has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from torchscout.decision.types import NOT_CHECKED, Manifestation, Scope, Status
from torchscout.metrics.samples import METRICS

FOLDER = Path(__file__).parents[2] / "monitoring"
ALERTS = FOLDER / "alerts.yml"
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


def expressions() -> list[str]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    alerts = [rule["expr"] for group in groups for rule in group["rules"]]
    return alerts + [target["expr"] for panel in panels for target in panel["targets"]]


def selectors(expression: str) -> Iterator[tuple[str, list[Any]]]:
    """Every metric of a PromQL expression with the matchers of its labels; raises for invalid ones."""
    waiting = [promql_parser.parse(expression.replace("$__rate_interval", "5m"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, promql_parser.VectorSelector):
            yield node.name, node.matchers.matchers
        for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "args", "param"):
            child = getattr(node, name, None)
            waiting += child if isinstance(child, list) else [] if child is None else [child]


@pytest.mark.parametrize("expression", expressions())
def test_expressions_use_metrics_and_labels_that_are_exported(expression: str):
    found = [*selectors(expression)]
    assert {name for name, _ in found} == {*re.findall(r"torchscout_\w+", expression)}
    for name, matchers in found:
        assert name in METRICS
        for each in matchers:
            assert each.name in LABELS.get(name, COMMON)
            assert each.value in VALUES.get(each.name, {each.value})
    every = COMMON.union(*(LABELS.get(name, COMMON) for name, _ in found))
    for names in re.findall(r"(?:by|without) \(([^)]*)\)", expression):
        assert {each.strip() for each in names.split(",")} <= every
    for rated in re.findall(r"(?:rate|increase)\((\w+)", expression):
        assert METRICS[rated].kind == "counter"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_alert_rules():
    done = subprocess.run(["promtool", "check", "rules", ALERTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
