"""What is exported: pure samples, and the same numbers through Prometheus and OpenTelemetry."""

from __future__ import annotations

import logging
import math
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.http_server import http_server
from torchscout.config import MetricsConfig
from torchscout.metrics.export import MetricsExporter, export_metrics
from torchscout.metrics.samples import METRICS, Sample, samples
from torchscout.session.boundary import Boundary
from torchscout.session.off import Off
from torchscout.session.session import Parts, Session

TOTALS = {"count": 3, "seconds": 0.5, "bytes": 4096}
FULL: dict[str, Any] = {
    "step": 100,
    "incidents": [("sdc", "rank"), ("sdc", "rank"), ("hang", "process_group"), ("crash", "rank")],
    "failures": 2,
    "observer": {
        "silent_seconds": 1.5,
        "threshold_seconds": 5.0,
        "rounds": 4,
        "messages": 9,
        "malformed": 0,
        "restarts": 1,
        "connected": [0],
        "hub": 0,
        "pid": 1,
        "config": {},
    },
    "replay": {
        "is_on": True,
        "checks": 5,
        "certified": 80,
        "share": 0.01,
        "max_overhead": None,
        "oldest": 60,
        "turns": {"layer": {"targets": 4, "turns": 9}},
        "verdicts": [["sdc", "agree", 30], ["straggler", "inconclusive", 1]],
    },
    "checkpoint": {
        "latest": 80,
        "candidate": None,
        "interim": None,
        "verified": 60,
        "copied": 80,
        "capturing": None,
        "durable": [40, 60],
        "poisoned": None,
        "captures": {**TOTALS, "skipped": 0},
        "copies": TOTALS,
        "problems": 0,
    },
}
OFF = {**FULL, "observer": None, "replay": None, "checkpoint": None, "incidents": [], "failures": 0}


def value(found: list[Sample], name: str, **labels: str) -> float | None:
    values = [each.value for each in found if each.name == name and {**each.labels} == labels]
    assert len(values) < 2
    return values[0] if values else None


def test_every_metric_is_sampled_once_per_labels():
    found = samples(FULL)
    assert {each.name for each in found} == {*METRICS}
    assert len({(each.name, *each.labels.items()) for each in found}) == len(found)
    assert all(math.isfinite(each.value) for each in found)


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("incidents_total", {"manifestation": "sdc", "scope": "rank"}, 2),
        ("incidents_total", {"manifestation": "hang", "scope": "process_group"}, 1),
        ("incidents_total", {"manifestation": "crash", "scope": "rank"}, 1),
        ("incidents_total", {"manifestation": "straggler", "scope": "rank"}, 0),
        ("verdicts_total", {"manifestation": "sdc", "status": "agree"}, 30),
        ("verdicts_total", {"manifestation": "sdc", "status": "attributed"}, 0),
        ("certified_lag_steps", {}, 20),
        ("coverage_age_steps", {}, 40),
        ("coverage_cycles", {"recipe": "layer"}, 2),
        ("generation_step", {"level": "verified"}, 60),
        ("generation_step", {"level": "candidate"}, None),
        ("copy_bytes_total", {}, 4096),
    ],
)
def test_samples_have_the_values(name: str, labels: dict[str, str], expected: float | None):
    assert value(samples(FULL), f"torchscout_{name}", **labels) == expected


def test_what_is_off_or_not_known_has_no_sample():
    assert {each.name for each in samples(OFF)} == {
        *("torchscout_step", "torchscout_incidents_total", "torchscout_failures_total")
    }
    gone = {"problem": "the observer is gone", "hub": None, "pid": 1, "restarts": 2}
    found = samples({**OFF, "observer": gone})
    assert value(found, "torchscout_observer_up") == 0
    assert value(found, "torchscout_silence_seconds") is None
    early = {**FULL["replay"], "certified": None, "share": None, "oldest": None, "is_on": False}
    found = samples({**OFF, "replay": early})
    assert value(found, "torchscout_certified_step") is None
    assert value(found, "torchscout_certified_lag_steps") == 100
    assert value(found, "torchscout_checks_running") == 0


class Fixed(Session):
    """A session with no job behind it, whose metrics a test sets."""

    def __init__(self, numbers: dict[str, Any], run_dir: Path) -> None:
        super().__init__(Parts(run_dir=run_dir, boundary=Boundary(3)))
        self._end_once.acquire()  # there is nothing to log at the end
        self._has_ended.set()
        self.numbers = numbers

    def metrics(self) -> dict[str, Any]:
        return self.numbers


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Fixed]:
    with Fixed(FULL, tmp_path / 'run "1"\\') as session:
        yield session


def families(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (each.name, frozenset(each.labels.items())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def expected(session: Session) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    common = {"rank": "3", "run": session.run_dir.name}
    return {(each.name, frozenset({**common, **each.labels}.items())): each.value for each in samples(FULL)}


def scraped(exporter: MetricsExporter) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_reads_all_samples_from_the_endpoint(session: Fixed):
    exporter = export_metrics(session, MetricsConfig(port=0))
    exporter.refresh()
    text = scraped(exporter)
    assert families(text) == expected(session)
    for name, metric in METRICS.items():
        assert f"# TYPE {name} {metric.kind}\n" in text
    session.close()
    with pytest.raises(OSError, match="refused"):
        scraped(exporter)


def test_the_textfile_has_the_same_and_goes_with_the_session(session: Fixed, tmp_path: Path):
    exporter = export_metrics(session, MetricsConfig(textfile=tmp_path))
    exporter.refresh()
    path = tmp_path / "torchscout-rank-3.prom"
    assert families(path.read_text()) == expected(session)
    assert path.stat().st_mode & 0o777 == 0o644
    session.numbers = {**FULL, "step": 101}
    exporter.refresh()
    assert " 101.0\n" in path.read_text()
    session.close()
    assert [*tmp_path.glob("*.prom*")] == []


@pytest.mark.parametrize("manner", ["with", "at exit"])
@pytest.mark.parametrize("error", [RuntimeError("connection closed by peer"), SystemExit(143), None])
def test_the_textfile_stays_if_the_session_ends_by_an_exception(
    manner: str, error: BaseException | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    session = Fixed(FULL, tmp_path / "run")
    exporter = export_metrics(session, MetricsConfig(textfile=tmp_path))
    exporter.refresh()
    if manner == "at exit":
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        exporter.at_exit()
    with suppress(RuntimeError, SystemExit), session:
        if error is not None:
            raise error
    kept = [families(path.read_text()) for path in tmp_path.glob("*.prom")]
    assert kept == ([] if error is None else [expected(session)])


def test_a_collector_receives_all_samples_over_otlp(session: Fixed):
    with http_server() as received:
        exporter = export_metrics(session, MetricsConfig(otlp=f"{received.url}/v1/metrics"))
        exporter.refresh()
        bodies = [*received.bodies]
        session.close()
    assert {*received.paths} == {"/v1/metrics"}
    request = ExportMetricsServiceRequest.FromString(bodies[-1])
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    found = {}
    for metric in scope.metrics:
        is_counter = metric.WhichOneof("data") == "sum"
        assert not is_counter or metric.sum.is_monotonic
        for point in (metric.sum if is_counter else metric.gauge).data_points:
            labels = {each.key: each.value.string_value for each in point.attributes}
            number = getattr(point, point.WhichOneof("value"))
            found[metric.name + "_total" * is_counter, frozenset(labels.items())] = number
    assert found == expected(session)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_port_in_use_is_one_sentence_and_is_tried_again(session: Fixed, caplog: pytest.LogCaptureFixture):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        exporter = export_metrics(session, MetricsConfig(port=port))
        exporter.refresh()
        exporter.refresh()
        assert exporter.port is None
    exporter.refresh()
    assert families(scraped(exporter)) == expected(session)
    (line,) = warnings_of(caplog)
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in line


@pytest.mark.parametrize(
    ("settings", "package", "extra"),
    [
        ({"port": 0}, "prometheus_client", "prometheus"),
        ({"otlp": "http://127.0.0.1:9"}, "opentelemetry.sdk.metrics", "otel"),
    ],
)
def test_a_missing_package_is_one_sentence(
    settings: dict[str, Any],
    package: str,
    extra: str,
    session: Fixed,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    for name in [*sys.modules]:
        if name.startswith(("torchscout.metrics.prometheus", "torchscout.metrics.opentelemetry")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    exporter = export_metrics(session, MetricsConfig(**settings))
    exporter.refresh()
    exporter.refresh()
    session.close()  # while the package is missing
    (line,) = warnings_of(caplog)
    assert f"pip install 'torchscout[{extra}]'" in line
    assert session.failures == []


def test_a_folder_that_is_not_there_is_one_sentence(
    session: Fixed, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    exporter = export_metrics(session, MetricsConfig(port=0, textfile=tmp_path / "none"))
    exporter.refresh()
    exporter.refresh()
    (line,) = warnings_of(caplog)
    assert "No such file or directory" in line
    assert families(scraped(exporter)) == expected(session), "the endpoint works all the same"


def test_with_torchscout_off_nothing_is_exported(tmp_path: Path):
    with Off() as session:
        exporter = export_metrics(session, MetricsConfig(port=0, textfile=tmp_path))
    assert (exporter.port, [*tmp_path.iterdir()]) == (None, [])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("port", -1), ("port", 70_000), ("port", "x"), ("otlp", "collector:4318"), ("interval_seconds", 0.0)],
)
def test_wrong_settings_are_refused(name: str, wrong: object):
    with pytest.raises(ValueError, match=f"{name} must .*{wrong}"):
        MetricsConfig(**{name: wrong})
