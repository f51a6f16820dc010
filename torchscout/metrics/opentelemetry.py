"""Metrics for an OpenTelemetry collector, over OTLP and HTTP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from torchscout.metrics.samples import METRICS, Sample

__all__ = ["Push"]

_TIMEOUT_SECONDS = 2.0


class Push:
    """Sends all metrics at each update. It has a provider of its own, apart from that of the program."""

    def __init__(self, latest: Callable[[], Sequence[Sample]], labels: Mapping[str, str], url: str) -> None:
        exporter = OTLPMetricExporter(endpoint=url, timeout=_TIMEOUT_SECONDS)
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
        resource = Resource.create({"service.name": "torchscout"})
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._latest, self._labels = latest, labels
        meter = self._provider.get_meter("torchscout")
        for name, metric in METRICS.items():
            # The suffix is Prometheus', which adds it to the counters that it receives from a collector.
            plain = name.removesuffix("_total")
            counter, gauge = meter.create_observable_counter, meter.create_observable_gauge
            make = counter if metric.kind == "counter" else gauge
            make(plain, [self._reader_of(name)], description=metric.help)

    def update(self) -> None:
        self._provider.force_flush(1000 * _TIMEOUT_SECONDS)

    def close(self) -> None:
        self._provider.shutdown(1000 * _TIMEOUT_SECONDS)

    def _reader_of(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_: CallbackOptions) -> Iterable[Observation]:
            of_name = [each for each in self._latest() if each.name == name]
            return [Observation(each.value, {**self._labels, **each.labels}) for each in of_name]

        return read
