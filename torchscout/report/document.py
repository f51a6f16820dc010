"""The report as one plain document, from what was read of a run (pure). The page and ``--json`` show it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchscout.decision.types import Action, Incident, Manifestation
from torchscout.mesh import AXES
from torchscout.report.comparisons import Compared, Comparisons, Round, Target
from torchscout.report.evidence import (
    is_shown_apart,
    record_of,
    records_of,
    stacks_of,
    strip,
    waits_of,
)
from torchscout.report.standing import job_state, state_of
from torchscout.run.reader import Reported, Run, read_run
from torchscout.utils.text import named, spans

__all__ = ["SCHEMA", "document_of", "documented", "examined", "incident_document", "summary"]

SCHEMA = 1
"""Version of the document."""
_MOST_STRIPS = 24
_MOST_ROWS, _MOST_SURFACES, _MOST_NAMES = 2000, 40, 12
_MOST_EVENTS, _MOST_POINTS = 1000, 1000
_ACTIONS = {
    Action.CONTINUE: "Continue.",
    Action.RESTART: "Restart the job in place.",
    Action.INSPECT: "Inspect the hardware.",
    Action.PREFLIGHT: "Check the machines before they train again.",
    Action.REPLACE: "Replace the machine.",
    Action.STOP: "Stop the job.",
}


def document_of(run: Run, records: Comparisons, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that the page shows; numbers, texts, lists and dictionaries only. ``job`` is what
    ``job_state`` has returned."""
    compared = records.with_times(each for reported in run.incidents for each in reported.incident.records)
    size = _size(run, records)
    incidents = [_incident(number, each, run) for number, each in enumerate(run.incidents, start=1)]
    return {
        "schema": SCHEMA,
        "run_dir": str(run.run_dir),
        "sentence": summary(run, incidents, size, job),
        "ranks": _ranks(run, size),
        "incidents": incidents,
        "decisions": [each.to_json() for _, each in run.decisions],
        "timeline": _timeline(run),
        "trust": _thinned(
            [[time, t.step, t.latest, t.candidate, t.verified, t.poisoned] for time, t in run.trust]
        ),
        "keeps_checkpoints": all(each.is_kept for _, each in run.trust[-1:]),
        "strips": _strips(compared),
        "coverage": _coverage(compared),
        "not_checked": _not_checked(compared, size),
        "problems": run.problems,
        "unlisted_problems": run.unlisted,
    }


def documented(run_dir: Path) -> dict[str, Any]:
    """Read a run directory, and return its document."""
    run = read_run(run_dir)
    return document_of(run, Comparisons.read(run), job_state(run))


def examined(run_dir: Path) -> dict[str, Any]:
    """Return the report of ``scout status``; raises ``ValueError`` if this is no run directory."""
    run = read_run(run_dir)
    if not run.entries:
        missing = f"{run_dir} is not the run directory of a job: it has no ranks/rank-0.json"
        raise ValueError(run.problems[0] if run.problems else missing)
    return {
        "run_dir": str(run_dir),
        **job_state(run),
        "incidents": [
            incident_document(number, each, run) for number, each in enumerate(run.incidents, start=1)
        ],
        "decisions": [each.to_json() for _, each in run.decisions],
        "problems": run.problems,
        "unlisted_problems": run.unlisted,
    }


def _size(run: Run, records: Comparisons) -> int:
    """The number of ranks, as far as any file shows it."""
    shown = [rank for each in run.incidents for record in each.incident.records for rank in record.peers]
    seen = [*(entry.rank for entry in run.entries), *records.ranks, *shown]
    return max([*(entry.size for entry in run.entries), *(rank + 1 for rank in seen)], default=0)


def summary(run: Run, incidents: Sequence[dict[str, Any]], size: int, job: Mapping[str, Any]) -> str:
    """Return the first sentences of the page."""
    hosts = len({entry.host for entry in run.entries})
    still_open = sum(each["state"] == "open" for each in incidents)
    states = Counter(state_of(rank) for rank in job["ranks"])
    known = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no end recorded"
    steps = [end.step for end in run.ends] or [each.step for _, each in run.trust]
    last = f"; last step {max(steps)}" if steps else ""
    unwatched = f" Not watched for hangs to the end: {named(run.unwatched)}." if run.unwatched else ""
    found = f"{len(incidents)} incident{'s' * (len(incidents) != 1)}" if incidents else "No incidents"
    return (
        f"{found}, {still_open} open. {size} rank{'s' * (size != 1)} on {hosts} "
        f"machine{'s' * (hosts != 1)}: {known}{last}.{unwatched}"
    )


def _ranks(run: Run, size: int) -> dict[str, Any]:
    """Columns by rank; a rank without an entry has None. Texts are indices into lists."""
    by_rank = {entry.rank: entry for entry in run.entries if 0 <= entry.rank < size}
    hosts, devices = dict[str, int](), dict[str, int]()
    found: dict[str, list[Any]] = {name: [None] * size for name in ("host", "device", "pid", "end")}
    with_address = {rank: entry.address for rank, entry in by_rank.items() if len(entry.address) == len(AXES)}
    for rank, entry in by_rank.items():
        found["host"][rank] = hosts.setdefault(entry.host, len(hosts))
        found["device"][rank] = devices.setdefault(entry.device, len(devices))
        found["pid"][rank] = entry.pid
    for end in run.ends:
        found["end"][end.rank] = [end.how, end.step, *([end.why] if end.why else [])]
    used = [
        axis
        for position, axis in enumerate(AXES)
        if len({address[position] for address in with_address.values()}) > 1
    ]
    axes = {
        axis: [with_address[rank][AXES.index(axis)] if rank in with_address else None for rank in range(size)]
        for axis in used
    }
    observed = sum(not entry.has_no_observer and entry.rank not in run.unwatched for entry in run.entries)
    return {
        "size": size,
        "hosts": list(hosts),
        "devices": list(devices),
        "axes": axes,
        "observed": observed,
    } | found


def incident_document(number: int, reported: Reported, run: Run) -> dict[str, Any]:
    """Return an incident with its place and what was decided about it, without the evidence."""
    incident, end = reported.incident, reported.end
    decision = next((each for _, each in run.decisions if each.incident == incident.id), None)
    return {
        "id": incident.id,
        "number": number,
        "time": reported.time,
        "step": incident.step,
        "manifestation": incident.manifestation.value,
        "launcher": incident.launcher,
        "scope": incident.scope.value,
        "ranks": spans(incident.ranks),
        "hosts": list(incident.hosts),
        "where": _where(incident, run),
        "sentence": incident.sentence,
        "state": "open" if end is None else end.state,
        "resolved": end is not None,
        "recovered": None if end is None else end.recovered,
        "todo": _ACTIONS[incident.action] if decision is None else decision.sentence,
        "is_decided": decision is not None,
        "is_carried_out": decision is not None and decision.is_carried_out,
    }


def _incident(number: int, reported: Reported, run: Run) -> dict[str, Any]:
    incident = reported.incident
    waits = waits_of(incident) if incident.manifestation is Manifestation.HANG else []
    waiting = {rank for each in waits for first, last in each["inside"] for rank in range(first, last + 1)}
    return {
        **incident_document(number, reported, run),
        "waits": waits,
        "waiting": spans(waiting.difference(incident.ranks)),
        "records": records_of(each for each in incident.records if not is_shown_apart(each)),
        "operations": [
            record_of(each) for each in incident.records if is_shown_apart(each) and each.surface != "stack"
        ],
        "stacks": stacks_of(incident),
    }


def _where(incident: Incident, run: Run) -> list[str]:
    """The place of each of the first ranks that are named: host, device and coordinates."""
    entries = {entry.rank: entry for entry in run.entries}
    places = []
    for rank in incident.ranks[:8]:
        entry = entries.get(rank)
        if entry is None:
            places.append(f"rank {rank}: not in the roster")
            continue
        coordinates = [
            f"{axis} {at}" for axis, at in zip(AXES, entry.address, strict=False) if at or axis == "replica"
        ]
        device = f", device {entry.device}" if entry.device else ""
        at = f" ({', '.join(coordinates)})" if coordinates else ""
        places.append(f"rank {rank}: host {entry.host}{device}{at}")
    more = len(incident.ranks) - len(places)
    return [*places, *([f"and {more} more"] if more else [])]


def _timeline(run: Run) -> list[dict[str, Any]]:
    """What happened, in the order of time."""
    numbers = {each.incident.id: number for number, each in enumerate(run.incidents, start=1)}
    events: list[dict[str, Any]] = []

    def add(time: float, step: int, kind: str, text: str, incident: int | None = None) -> None:
        events.append({"time": time, "step": step, "kind": kind, "text": text, "incident": incident})

    for time, started in run.starts:
        add(time, started.step, "start", started.sentence)
    for reported in run.incidents:
        incident = reported.incident
        add(reported.time, incident.step, "incident", incident.sentence, numbers[incident.id])
    for time, end in run.resolved:
        after = (
            f"after {end.stalled_seconds:.1f} s" if end.recovered is None else f"from step {end.recovered}"
        )
        word = "moved again" if end.recovered is None else "recovered"
        text = f"{named(end.ranks)} {word} {after}."
        add(time, end.step, "end", f"{text[0].upper()}{text[1:]}", numbers.get(end.incident))
    for time, decision in run.decisions:
        kept = "" if decision.is_carried_out else "Not carried out: "
        about = numbers.get(decision.incident)
        add(time, decision.step, "decision", f"{kept}{decision.sentence}", about)
    return sorted(events, key=lambda event: event["time"])[-_MOST_EVENTS:]


def _thinned(points: list[Any]) -> list[Any]:
    """At most ``_MOST_POINTS`` of them, evenly, with the first and the last."""
    if len(points) <= _MOST_POINTS:
        return points
    last = len(points) - 1
    return [points[index * last // (_MOST_POINTS - 1)] for index in range(_MOST_POINTS)]


def _strips(comparisons: Comparisons) -> list[dict[str, Any]]:
    """The series with slow ranks first, then those with the widest range."""

    def weight(rounds: Iterable[Round]) -> tuple[int, float]:
        kept = list(rounds)
        worst = max((max(each.times) / (min(each.times) or 1) for each in kept if each.times), default=0.0)
        return sum(bool(each.outliers) for each in kept), worst

    ordered = sorted(comparisons.times.items(), key=lambda item: weight(item[1].values()), reverse=True)
    return [
        strip(series, sorted(rounds.values(), key=lambda each: each.step))
        for series, rounds in ordered[:_MOST_STRIPS]
    ]


def _coverage(comparisons: Comparisons) -> list[dict[str, Any]]:
    """One row for each layer, or surface without a layer, and kind of failure."""
    rows: dict[tuple[str, str], list[tuple[Target, Compared]]] = defaultdict(list)
    layers = {target.layer for target in comparisons.compared if target.layer and "/" not in target.layer}
    for target, compared in comparisons.compared.items():
        name = _layer_of(target.layer or target.surface, layers)
        rows[name, target.manifestation.value].append((target, compared))
    found = []
    for (name, manifestation), parts in sorted(rows.items(), key=lambda row: _natural(row[0])):
        surfaces = sorted({target.surface for target, _ in parts})
        shapes = sorted({shape for _, each in parts for shape in each.shapes})
        found.append(
            {
                "name": name,
                "manifestation": manifestation,
                "surfaces": surfaces[:_MOST_SURFACES],
                "surface_count": len(surfaces),
                "modes": sorted({target.mode for target, _ in parts if target.mode}),
                "shapes": [list(shape) for shape in shapes[:_MOST_NAMES]],
                "groups": len({target.peers for target, _ in parts}),
                "group": spans(parts[0][0].peers),
                "count": sum(each.count for _, each in parts),
                "findings": sum(each.findings for _, each in parts),
                "first": min(each.first for _, each in parts),
                "last": max(each.last for _, each in parts),
            }
        )
    return found[:_MOST_ROWS]


def _layer_of(name: str, layers: Collection[str]) -> str:
    """The innermost layer that a parameter belongs to; the name itself if there is none."""
    module = name.partition("/")[0]
    while module and module not in layers:
        module = module.rpartition(".")[0]
    return module or name


def _natural(key: tuple[str, str]) -> tuple[list[tuple[int, str]], str]:
    """Sorts ``layer.10`` after ``layer.9``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in key[0].split(".")], key[1]


def _not_checked(records: Comparisons, size: int) -> list[dict[str, Any]]:
    found = [
        {
            "reason": reason,
            "surfaces": sorted(each.surfaces)[:_MOST_NAMES],
            "surface_count": len(each.surfaces),
            "ranks": spans(each.ranks),
            "first": each.first,
            "last": each.last,
        }
        for reason, each in sorted(records.not_checked.items(), key=lambda item: -item[1].last)
    ]
    silent = set(range(size)) - records.ranks
    # One rank of each group of peers is enough to know what the group compared.
    silent -= {rank for target in records.compared for rank in target.peers}
    if silent:
        found.append(
            {
                "reason": "There are no records of comparisons with these ranks.",
                "surfaces": [],
                "surface_count": 0,
                "ranks": spans(silent),
                "first": None,
                "last": None,
            }
        )
    return found
