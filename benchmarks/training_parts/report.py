"""From raw times to figures, and from figures to tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from reporting import heading

from training_parts.breakdown import by_kind, by_part
from training_parts.end_to_end import figures_of

Figures = dict[str, dict[str, Any]]
NOTHING_DUE, DEFAULT, CHECK = 0.001, 0.005, 1.5
"""The goals: a step on which nothing is due, the default configuration, a check to what it replays."""


def summary(report: dict[str, Any]) -> dict[str, Figures]:
    ranks = report["ranks"]
    figures: dict[str, Figures] = {}
    if "windows" in ranks[0]:
        figures["steps"] = _steps([rank["windows"] for rank in ranks])
    if "reference" in ranks[0]:
        figures["reference"] = _reference([rank["reference"] for rank in ranks], figures.get("steps", {}))
    if "end-to-end" in ranks[0]:
        figures["whole jobs"] = figures_of([rank["end-to-end"] for rank in ranks])
    if "exchanges" in ranks[0]:
        figures["exchanges"] = _flat(ranks[0]["exchanges"])
    if "collectives" in ranks[0]:
        figures["collectives"] = _collectives([rank["collectives"] for rank in ranks])
    if "breakdown" in ranks[0]:
        rows = _mean_of([rank["breakdown"]["ms"] for rank in ranks])
        calls = ranks[0]["breakdown"]["calls"]
        figures["breakdown by part"] = _sorted({k: {"ms": v} for k, v in by_part(rows).items()})
        figures["breakdown by recipe"] = _sorted({k: {"ms": v} for k, v in by_kind(rows).items()})
        figures["breakdown"] = _sorted({k: {"ms": v, "calls": calls.get(k, 0)} for k, v in rows.items()})
        total = sum(v for k, v in rows.items() if not k.startswith("training"))
        figures["breakdown by part"]["sum, without capture"] = {"ms": round(total, 3)}
    return figures


def _steps(windows: Sequence[Sequence[dict[str, Any]]]) -> Figures:
    """Each window against its neighbours, by mode: the mean of ranks, the median and range of rounds."""
    totals = [
        statistics.fmean(sum(each["device"]) / each["steps"] for each in row)
        for row in zip(*windows, strict=True)
    ]
    hosts = [
        statistics.fmean(sum(each["host"]) / each["steps"] for each in row)
        for row in zip(*windows, strict=True)
    ]
    peaks = [max(each["peak"] for each in row) for row in zip(*windows, strict=True)]
    first = windows[0]
    without = [total for total, each in zip(totals, first, strict=True) if each["mode"] == "without"]
    found: Figures = {
        "without": {"step_ms": _round(statistics.median(without)), "step_ms_range": _range(without)},
    }
    rows: dict[str, list[dict[str, float]]] = {}
    for place, each in enumerate(first):
        if each["mode"] != "without":
            beside = (totals[place - 1] + totals[place + 1]) / 2
            row = {
                "ratio": totals[place] / beside - 1,
                "host": hosts[place] - (hosts[place - 1] + hosts[place + 1]) / 2,
                "peak": peaks[place] - max(peaks[place - 1], peaks[place + 1]),
            }
            if each["checks"]:
                row["check"] = (totals[place] - beside) * each["steps"] / each["checks"]
            rows.setdefault(each["mode"], []).append(row)
    # The noise of the same arithmetic where nothing was attached in between.
    pairs = [b / ((a + c) / 2) - 1 for a, b, c in zip(without, without[1:], without[2:], strict=False)]
    found["without"]["noise_percent"] = _range([100 * each for each in pairs]) if pairs else None
    for mode, taken in rows.items():
        ratios = [100 * each["ratio"] for each in taken]
        found[mode] = {
            "overhead_percent": _round(statistics.median(ratios)),
            "range": _range(ratios),
            "peak_MiB_above": round(max(each["peak"] for each in taken) / 2**20, 1),
        }
        if "check" in taken[0]:
            checks = [each["check"] for each in taken]
            found[mode] |= {"check_ms": _round(statistics.median(checks)), "check_ms_range": _range(checks)}
        if mode.endswith("nothing due") or mode == "observer":
            found[mode]["goal_percent"] = 100 * NOTHING_DUE
        if mode == "default configuration":
            found[mode]["goal_percent"] = 100 * DEFAULT
    return found


def _reference(ranks: Sequence[dict[str, Any]], steps: Figures) -> Figures:
    names = list(ranks[0]["ms"])
    medians = {name: statistics.median([x for rank in ranks for x in rank["ms"][name]]) for name in names}
    spread = {name: _range([x for rank in ranks for x in rank["ms"][name]]) for name in names}
    found: Figures = {name: {"ms": _round(medians[name]), "range": spread[name]} for name in names}
    replayed = sum(medians[name] for name in ("embedding", "layer", "output"))
    both = medians["broadcast of inputs and output gradients"]
    found["forward and backward of what a check replays"] = {"ms": _round(replayed)}
    found["goal for a check"] = {
        "ms": _round(CHECK * replayed + medians["broadcast of inputs"]),
        "with_output_gradients_ms": _round(CHECK * replayed + both),
    }
    if "check" in steps:
        check = steps["check"]["check_ms"]
        found["a check"] = {"ms": check, "to_its_goal": _round(check / (CHECK * replayed + both))}
    kept = ranks[0]["layer_activations"]
    found["one layer's activations"] = {"MiB": None if kept is None else round(kept / 2**20, 1)}
    return found


def _collectives(ranks: Sequence[dict[str, Any]]) -> Figures:
    medians = {
        name: statistics.median([x for rank in ranks for x in rank["us"][name]]) for name in ranks[0]["us"]
    }
    added = medians["observer"] - medians["without"]
    count = ranks[0]["in_a_step"]
    return {
        "issue an all-reduce": {f"{name}_us": _round(each) for name, each in medians.items()},
        "observer": {"us_a_collective": _round(added), "collectives_in_a_step": count},
    }


def _flat(found: dict[str, Any]) -> Figures:
    rows: Figures = {}
    for name, figures in found.items():
        counts, sizes = figures.get("collectives", {}), figures.get("bytes", {})
        rows[name] = {"waits_for_the_device": _round(figures["waits_for_the_device"])}
        for key, count in counts.items():
            rows[f"{name}: {key}"] = {"count": _round(count), "KiB": _round(sizes[key] / 1024)}
    return rows


def _mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: statistics.fmean(row.get(key, 0.0) for row in rows) for key in keys}


def _sorted(rows: Figures) -> Figures:
    rounded = {name: {key: _round(value) for key, value in row.items()} for name, row in rows.items()}
    return dict(sorted(rounded.items(), key=lambda row: -row[1]["ms"]))


def _range(values: Sequence[float]) -> str:
    return f"{_round(min(values))} to {_round(max(values))}"


def _round(value: float) -> float:
    return float(f"{value:.3g}") if abs(value) < 100 else round(value, 1)


def _heading(report: dict[str, Any]) -> str:
    return heading(report, ", ".join(f"{key} {value}" for key, value in report["job"].items()))


def table(report: dict[str, Any]) -> str:
    lines = [_heading(report)]
    for part, figures in report["figures"].items():
        lines += ["", part]
        for name, row in figures.items():
            cells = ", ".join(f"{key} {value}" for key, value in row.items() if value is not None)
            lines.append(f"  {name:44} {cells}")
    return "\n".join(lines)


def markdown(report: dict[str, Any]) -> str:
    lines = [_heading(report)]
    render: Callable[[Any], str] = lambda value: "" if value is None else str(value)  # noqa: E731
    for part, figures in report["figures"].items():
        columns = list(dict.fromkeys(key for row in figures.values() for key in row))
        lines += ["", f"| {part} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
        for name, row in figures.items():
            lines.append(f"| {name} | {' | '.join(render(row.get(key)) for key in columns)} |")
    return "\n".join(lines)
