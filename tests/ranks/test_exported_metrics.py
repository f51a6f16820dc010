"""Metrics of real jobs: they say what happened, can be read while the job trains, and change nothing."""

from __future__ import annotations

import threading
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

from tests.support.findings import evidence_of
from tests.support.http_server import http_server
from tests.support.ranks import run_ranks
from tests.support.replay_jobs import EVERY_STEP, Job, bytes_of
from tests.support.small_job import until
from torchscout.config import CheckpointConfig, MetricsConfig, ObserverConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.metrics.export import export_metrics
from torchscout.run.notify import Webhook

RANKS, STEPS, FAULTY_STEP = 3, 8, 5
FLIP = FaultPlan().flip_bit(rank=2, at="stack.0.up/weight", step=FAULTY_STEP, bit=3)
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Exported:
    values: Values
    """At the end, as Prometheus reads them, without the labels that all have."""
    steps_seen: set[float]
    """The steps that were read while the job trained."""
    status: dict[str, Any]
    verdicts: Counter[tuple[str, str]]
    """As the records have them."""
    weights: bytes
    failures: list[str]


def scraped(port: int | None) -> Values:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    common = {"rank", "run"}
    return {
        (each.name, frozenset((k, v) for k, v in each.labels.items() if k not in common)): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def value(values: Values, name: str, **labels: str) -> float:
    return values[f"torchscout_{name}", frozenset(labels.items())]


def by_label(values: Values, name: str, label: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for (each, labels), number in values.items():
        if each == f"torchscout_{name}":
            found[dict(labels)[label]] += int(number)
    return found


def exported(rank: int, faults: FaultPlan, folder: Path, url: str | None = None) -> Exported:
    job, run_dir, seen = Job(rank), folder / "run", set[float]()
    with Injector(faults, rank, job.net, job.optimizer) as injector:
        session = job.attach(
            run_dir,
            EVERY_STEP,
            observer=ObserverConfig(address="127.0.0.1"),
            checkpoint=CheckpointConfig(folder / "checkpoints"),
            on_incident=None if url is None else Webhook(url),
        )
        exporter = export_metrics(session, MetricsConfig(port=0, interval_seconds=0.05))
        until(lambda: exporter.port is not None, "the endpoint is open")
        over = threading.Event()

        def read() -> None:
            while not over.is_set():
                seen.add(value(scraped(exporter.port), "step"))

        reader = threading.Thread(target=read)
        reader.start()
        for step in range(1, STEPS + 1):
            job.train()
            dist.barrier()
            until(lambda step=step: step in seen, "the step is read")
        over.set()
        reader.join()
    assert not injector.unfired
    exporter.refresh()
    values, status = scraped(exporter.port), session.status()
    failures = list(session.failures)
    session.close()
    found = Counter((each.manifestation.value, each.status) for each in evidence_of(run_dir, rank))
    return Exported(values, seen, status, found, bytes_of(job.net.parameters()), failures)


def alone(rank: int) -> bytes:
    job = Job(rank)
    job.train(STEPS)
    return bytes_of(job.net.parameters())


@pytest.mark.long
def test_metrics_of_a_healthy_job_say_so_and_training_is_bitwise_the_same(tmp_path: Path):
    for found, weights in zip(
        run_ranks(exported, RANKS, FaultPlan(), tmp_path, timeout=120),
        run_ranks(alone, RANKS, timeout=60),
        strict=True,
    ):
        assert found.weights == weights
        assert found.failures == []
        assert found.steps_seen >= {*map(float, range(1, STEPS + 1))}
        of = found.values
        assert {*by_label(of, "incidents_total", "manifestation").items()} >= {("sdc", 0), ("hang", 0)}
        assert by_label(of, "incidents_total", "manifestation")["sdc"] == 0
        assert value(of, "failures_total") == 0
        assert value(of, "checks_total") == found.status["replay"]["checks"] == STEPS
        assert value(of, "certified_lag_steps") == STEPS - found.status["replay"]["certified"]
        assert value(of, "verdicts_total", manifestation="sdc", status="attributed") == 0
        agreed = found.verdicts["sdc", "agree"]
        assert value(of, "verdicts_total", manifestation="sdc", status="agree") == agreed > STEPS
        assert value(of, "observer_up") == 1
        assert value(of, "silence_threshold_seconds") >= 5.0
        assert value(of, "captures_total") >= STEPS - 2
        assert value(of, "capture_bytes_total") > value(of, "captures_total") * len(weights)
        assert value(of, "capture_seconds_total") > 0
        latest = found.status["checkpoint"]["latest"]
        assert value(of, "generation_step", level="latest") == latest > 0
        assert value(of, "poisoned") == 0


@pytest.mark.long
def test_a_flip_raises_the_counters_of_all_ranks_and_is_posted_once(tmp_path: Path):
    with http_server() as received:
        results = run_ranks(exported, RANKS, FLIP, tmp_path, received.url, timeout=120)
        until(lambda: len(received.bodies) >= 1, "the incident is posted")
    assert len(received.bodies) == 1
    for found in results:
        assert found.failures == []
        of = found.values
        assert value(of, "incidents_total", manifestation="sdc", scope="rank") == 1
        assert sum(by_label(of, "incidents_total", "manifestation").values()) == 1
        attributed = found.verdicts["sdc", "attributed"]
        assert value(of, "verdicts_total", manifestation="sdc", status="attributed") == attributed > 0
        assert value(of, "poisoned") == 1
        assert value(of, "certified_step") == FAULTY_STEP - 1
        assert value(of, "certified_lag_steps") == STEPS - FAULTY_STEP + 1


def test_metrics_are_read_while_training_is_blocked(tmp_path: Path):
    """One rank does not come to a collective; on the others the silence grows in what Prometheus reads."""
    assert min(run_ranks(blocked, RANKS, tmp_path, timeout=120)) > 0.5


def blocked(rank: int, folder: Path) -> float:
    job = Job(rank)
    session = job.attach(folder / "run", None, observer=ObserverConfig(address="127.0.0.1"))
    exporter = export_metrics(session, MetricsConfig(port=0, interval_seconds=0.05))
    until(lambda: exporter.port is not None, "the endpoint is open")
    job.train(2)
    silences: list[float] = []
    over = threading.Event()

    def read() -> None:
        while not over.wait(0.1):
            silences.append(value(scraped(exporter.port), "silence_seconds"))

    reader = threading.Thread(target=read)
    reader.start()
    if rank == 1:
        until(lambda: max(silences, default=0.0) > 1.0, "it has been silent")
    dist.barrier()
    over.set()
    reader.join()
    session.close()
    return max(silences)
