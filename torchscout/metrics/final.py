"""The last values of a trainer's metrics, written by its observer once it has died: ``python -m
torchscout.metrics.final``, a process of its own, so that observers need no package for metrics.

It reads what the trainer exported, in a line of JSON: ``config``, ``labels``, ``run_dir`` and ``step``. It
passes on the step and the incidents; in a textfile all other values stay as the trainer has left them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from torchscout.config import MetricsConfig
from torchscout.metrics.samples import METRICS, Sample, incident_samples
from torchscout.run.reader import IncidentLog

__all__: list[str] = []


def main() -> None:
    wanted = json.load(sys.stdin)
    config, labels = MetricsConfig(**wanted["config"]), wanted["labels"]
    incidents = IncidentLog.read(wanted["run_dir"]).incidents
    counted = incident_samples([(each.manifestation.value, each.scope.value) for each in incidents])
    found = [Sample("torchscout_step", wanted["step"]), *counted]
    if config.textfile is not None:
        from torchscout.metrics.prometheus import Textfile, registry_of

        path = Path(config.textfile) / f"torchscout-rank-{labels['rank']}.prom"
        kept = [each for each in _exported(path, labels) if each.name not in {new.name for new in found}]
        Textfile(registry_of(lambda: [*found, *kept], labels), path).update()
    if config.otlp is not None:
        from torchscout.metrics.opentelemetry import Push

        push = Push(lambda: found, labels, config.otlp)
        push.update()
        push.close()


def _exported(path: Path, common: Mapping[str, str]) -> list[Sample]:
    """Return what the trainer has left, without the labels that all samples have."""
    from prometheus_client.parser import text_string_to_metric_families

    if not path.exists():
        return []
    families = text_string_to_metric_families(path.read_text())
    lines = [each for family in families for each in family.samples if each.name in METRICS]
    return [
        Sample(each.name, each.value, {key: text for key, text in each.labels.items() if key not in common})
        for each in lines
    ]


if __name__ == "__main__":
    main()
