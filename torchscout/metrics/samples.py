"""The metrics of a session as plain data: their names, their meaning, and their values now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torchscout.decision.types import NOT_CHECKED, Manifestation, Scope, Status

__all__ = ["METRICS", "Metric", "Sample", "incident_samples", "samples"]


class Metric(NamedTuple):
    kind: Literal["counter", "gauge"]
    help: str


class Sample(NamedTuple):
    """One value of a metric; its kind and help are in ``METRICS``."""

    name: str
    value: float
    labels: Mapping[str, str] = {}


def _counter(text: str) -> Metric:
    return Metric("counter", text)


def _gauge(text: str) -> Metric:
    return Metric("gauge", text)


METRICS: Mapping[str, Metric] = {
    "torchscout_step": _gauge("Training steps that have finished."),
    "torchscout_incidents_total": _counter(
        "Incidents of the job by manifestation and scope. Every rank counts all of them."
    ),
    "torchscout_failures_total": _counter("Failures of torchscout itself on this rank."),
    "torchscout_checks_total": _counter("Checks that have been made."),
    "torchscout_verdicts_total": _counter("Comparisons by manifestation and status."),
    "torchscout_checks_running": _gauge("1 if checks are made, 0 if they are off after a failure."),
    "torchscout_check_time_ratio": _gauge("Share of the time that checks take."),
    "torchscout_certified_step": _gauge("Newest step whose state checks have certified."),
    "torchscout_certified_lag_steps": _gauge(
        "Steps since the newest certified step, or since step 0 if there is none."
    ),
    "torchscout_coverage_age_steps": _gauge("Steps since the target was compared that has waited longest."),
    "torchscout_coverage_targets": _gauge("Targets of a recipe."),
    "torchscout_coverage_cycles": _gauge("How many times a recipe has visited all of its targets."),
    "torchscout_observer_up": _gauge("1 if the observer of this rank answers and reports no problem."),
    "torchscout_observer_restarts_total": _counter("How many times the observer was restarted."),
    "torchscout_observer_rounds_total": _counter("Rounds that the observer took part in after a silence."),
    "torchscout_observer_messages_total": _counter("Messages between the observer and hubs."),
    "torchscout_observer_malformed_total": _counter("Messages to the observer that could not be read."),
    "torchscout_silence_seconds": _gauge("How long this rank has published no progress."),
    "torchscout_silence_threshold_seconds": _gauge("How long a silence is normal in the current phase."),
    "torchscout_generation_step": _gauge(
        "Step of the newest generation with a trust level; copied: in another machine's memory."
    ),
    "torchscout_generations_in_files": _gauge("Generations whose files are complete on every rank."),
    "torchscout_poisoned": _gauge("1 after corruption was found, until the job goes back to earlier state."),
    "torchscout_captures_total": _counter("Snapshots of the state of this rank."),
    "torchscout_captures_skipped_total": _counter("Captures passed over because a rank had no memory ready."),
    "torchscout_capture_seconds_total": _counter("How long training has waited for snapshots."),
    "torchscout_capture_bytes_total": _counter("Bytes of all snapshots."),
    "torchscout_copies_total": _counter("Copies of shards that another machine has received."),
    "torchscout_copy_seconds_total": _counter("How long these copies took, in the background."),
    "torchscout_copy_bytes_total": _counter("Bytes of these copies."),
    "torchscout_checkpoint_problems": _gauge("Recent problems with checkpoints, 20 at most."),
}
"""All metrics by name."""

_COMPARED = (Manifestation.SDC, Manifestation.STRAGGLER)
_STATUSES = (*(each.value for each in Status), NOT_CHECKED)
_LEVELS = ("latest", "candidate", "interim", "verified", "copied")
_OBSERVER = {
    "torchscout_observer_restarts_total": "restarts",
    "torchscout_observer_rounds_total": "rounds",
    "torchscout_observer_messages_total": "messages",
    "torchscout_observer_malformed_total": "malformed",
    "torchscout_silence_seconds": "silent_seconds",
    "torchscout_silence_threshold_seconds": "threshold_seconds",
}
"""The keys of the observer's status."""


def samples(metrics: Mapping[str, Any]) -> list[Sample]:
    """Return what ``Session.metrics`` contains, as samples. What is not known has no sample.

    Counters by label start at 0, so that their first increase is seen.
    """
    step = metrics["step"]
    found = [Sample("torchscout_step", step), Sample("torchscout_failures_total", metrics["failures"])]
    found += incident_samples(metrics["incidents"])
    for part, samples_of in (("replay", _replay), ("observer", _observer), ("checkpoint", _checkpoint)):
        if metrics[part] is not None:
            found += samples_of(metrics[part], step)
    return found


def incident_samples(incidents: Sequence[tuple[str, str]]) -> Iterator[Sample]:
    """Return how many incidents there are by manifestation and scope."""
    counts = Counter(map(tuple, incidents))
    for manifestation in Manifestation:
        for scope in Scope:
            labels = {"manifestation": manifestation.value, "scope": scope.value}
            yield Sample("torchscout_incidents_total", counts[manifestation.value, scope.value], labels)


def _replay(replay: Mapping[str, Any], step: int) -> Iterator[Sample]:
    certified = replay["certified"]
    yield Sample("torchscout_checks_running", int(replay["is_on"]))
    yield Sample("torchscout_checks_total", replay["checks"])
    yield Sample("torchscout_certified_lag_steps", step - (certified or 0))
    yield from _known("torchscout_certified_step", certified)
    yield from _known("torchscout_check_time_ratio", replay["share"])
    if replay["oldest"] is not None:
        yield Sample("torchscout_coverage_age_steps", step - replay["oldest"])
    counts = {(manifestation, status): count for manifestation, status, count in replay["verdicts"]}
    for manifestation in _COMPARED:
        for status in _STATUSES:
            labels = {"manifestation": manifestation.value, "status": status}
            yield Sample("torchscout_verdicts_total", counts.get((manifestation.value, status), 0), labels)
    for recipe, each in replay["turns"].items():
        yield Sample("torchscout_coverage_targets", each["targets"], {"recipe": recipe})
        yield Sample("torchscout_coverage_cycles", each["turns"] // each["targets"], {"recipe": recipe})


def _observer(observer: Mapping[str, Any], _: int) -> Iterator[Sample]:
    yield Sample("torchscout_observer_up", int("problem" not in observer))
    for name, key in _OBSERVER.items():
        yield from _known(name, observer.get(key))


def _checkpoint(checkpoint: Mapping[str, Any], _: int) -> Iterator[Sample]:
    for level in _LEVELS:
        yield from _known("torchscout_generation_step", checkpoint[level], level=level)
    yield Sample("torchscout_generations_in_files", len(checkpoint["durable"]))
    yield Sample("torchscout_poisoned", int(checkpoint["poisoned"] is not None))
    yield Sample("torchscout_checkpoint_problems", checkpoint["problems"])
    yield Sample("torchscout_captures_skipped_total", checkpoint["captures"]["skipped"])
    for what, key in (("capture", "captures"), ("copy", "copies")):
        totals = checkpoint[key]
        yield Sample(f"torchscout_{key}_total", totals["count"])
        yield Sample(f"torchscout_{what}_seconds_total", totals["seconds"])
        yield Sample(f"torchscout_{what}_bytes_total", totals["bytes"])


def _known(name: str, value: float | None, **labels: str) -> list[Sample]:
    return [] if value is None else [Sample(name, value, labels)]
