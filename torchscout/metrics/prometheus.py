"""Metrics for Prometheus: an endpoint, or a file for node_exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from torchscout.metrics.samples import METRICS, Sample

__all__ = ["Endpoint", "Textfile", "registry_of"]

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class _Collector:
    def __init__(self, latest: Callable[[], Sequence[Sample]], labels: Mapping[str, str]) -> None:
        self._latest, self._labels = latest, labels

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for sample in self._latest():
            metric, labels = METRICS[sample.name], {**self._labels, **sample.labels}
            if sample.name not in families:
                families[sample.name] = _FAMILIES[metric.kind](sample.name, metric.help, labels=[*labels])
            families[sample.name].add_metric([*labels.values()], sample.value)
        return families.values()


def registry_of(latest: Callable[[], Sequence[Sample]], labels: Mapping[str, str]) -> CollectorRegistry:
    """Return a registry with what ``latest`` returns; each sample has these labels too."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(latest, labels))
    return registry


class Endpoint:
    """An HTTP server in threads of its own. It serves what was read last, however often it is asked."""

    def __init__(self, registry: CollectorRegistry, address: str, port: int) -> None:
        """Raises ``OSError`` if it cannot listen there."""
        self._server, self._thread = start_http_server(port, address, registry)
        self.port: int = self._server.server_port

    def update(self) -> None: ...

    def close(self) -> None:
        with ExitStack() as undo:
            undo.callback(self._thread.join, 1.0)
            undo.callback(self._server.server_close)
            self._server.shutdown()


class Textfile:
    """A file that is replaced at each update, and removed by ``close``, since nobody else knows its age."""

    def __init__(self, registry: CollectorRegistry, path: Path) -> None:
        self._registry, self._path = registry, path

    def update(self) -> None:
        write_to_textfile(str(self._path), self._registry)
        self._path.chmod(0o644)  # node_exporter is another user

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
