"""Exports the metrics of a session while it runs, from a thread of its own."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from torchscout.config import MetricsConfig
from torchscout.log import Problems
from torchscout.metrics.samples import Sample, samples
from torchscout.session.boundary import Boundary
from torchscout.session.ending import how_ended
from torchscout.session.off import Off
from torchscout.session.session import Session

__all__ = ["MetricsExporter", "export_metrics"]

_TEXTFILE, _COLLECTOR = "the textfile for Prometheus", "the OpenTelemetry collector"


class _Output(Protocol):
    def update(self) -> None: ...

    def close(self) -> None: ...


def export_metrics(session: Session, config: MetricsConfig) -> MetricsExporter:
    """Export this rank's metrics until the session is closed. Call it on each rank whose metrics you want.

    What prevents an export, such as a port that is in use or a package that is not installed, is logged once,
    and tried again.
    """
    exporter = MetricsExporter(session, config)
    session.before_close(exporter.close)
    atexit.register(exporter.at_exit)
    return exporter


class MetricsExporter:
    """Reads the metrics of a session from time to time, and passes them on."""

    def __init__(self, session: Session, config: MetricsConfig) -> None:
        self.latest: Sequence[Sample] = ()
        """What was read last."""
        self.port: int | None = None
        """The port of the endpoint; None if there is none."""
        self._session, self._config, self._pid = session, config, os.getpid()
        self._labels = {"rank": str(session.rank), "run": session.run_dir.name}
        self._wanted: dict[str, Callable[[], _Output]] = {}
        """How to open what is not open yet, by description."""
        if config.port is not None:
            self._wanted["the Prometheus endpoint"] = self._endpoint
        if config.textfile is not None:
            self._wanted[_TEXTFILE] = self._textfile
        if config.otlp is not None:
            self._wanted[_COLLECTOR] = self._push
        self._outputs: dict[str, _Output] = {}
        self._problems = Problems("metrics are not exported to")
        self._boundary = Boundary(session.rank)
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchscout-metrics", daemon=True)
        if not isinstance(session, Off):
            self._thread.start()
            self._boundary.guarded(lambda: session.leave_metrics(config, self._labels))

    def refresh(self) -> None:
        """Read the metrics and pass them on now."""
        with self._lock:
            if not self._closing.is_set():
                self.latest = samples(self._session.metrics())
                for name in [*self._wanted]:
                    self._attempt(name, partial(self._open, name))
                for name, output in self._outputs.items():
                    self._attempt(name, output.update)

    def at_exit(self) -> None:
        """Close it when the interpreter exits without having closed the session."""
        self._close(getattr(sys, "last_value", None))

    def close(self) -> None:
        """Stop, after the metrics have been passed on once more. Idempotent."""
        self._close(self._session.ended_by)

    def _close(self, error: BaseException | None) -> None:
        atexit.unregister(self.at_exit)
        if os.getpid() != self._pid:
            return  # a forked child: all of this belongs to its parent
        if not self._closing.is_set() and self._thread.is_alive():
            self._boundary.guarded(self.refresh)
        self._closing.set()
        with self._lock:
            while self._outputs:
                name, output = self._outputs.popitem()
                # After a failure the last values are still wanted. The observer adds the incident.
                if name != _TEXTFILE or how_ended(error) == "finished":
                    self._attempt(name, output.close)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._boundary.guarded(self.refresh)
            self._closing.wait(self._config.interval_seconds)

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        self._boundary.guarded(lambda: self._act(name, action))

    def _act(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except ImportError as error:
            extra = "otel" if name == _COLLECTOR else "prometheus"
            self._problems.add([f"{name}: {error}; pip install 'torchscout[{extra}]'"])
        except (OSError, OverflowError) as error:
            self._problems.add([f"{name}: {error}"])

    def _open(self, name: str) -> None:
        self._outputs[name] = self._wanted[name]()
        del self._wanted[name]

    def _endpoint(self) -> _Output:
        from torchscout.metrics.prometheus import Endpoint, registry_of

        port, address = self._config.port or 0, self._config.address
        port += int(os.environ.get("LOCAL_RANK", "0")) if port else 0
        try:
            endpoint = Endpoint(registry_of(lambda: self.latest, self._labels), address, port)
        except OSError as error:
            raise OSError(f"cannot listen at {address}:{port}: {error.strerror or error}") from error
        self.port = endpoint.port
        return endpoint

    def _textfile(self) -> _Output:
        from torchscout.metrics.prometheus import Textfile, registry_of

        path = Path(str(self._config.textfile)) / f"torchscout-rank-{self._session.rank}.prom"
        return Textfile(registry_of(lambda: self.latest, self._labels), path)

    def _push(self) -> _Output:
        from torchscout.metrics.opentelemetry import Push

        return Push(lambda: self.latest, self._labels, str(self._config.otlp))
