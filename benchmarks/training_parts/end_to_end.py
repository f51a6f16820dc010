"""Whole jobs as a user runs them: windows without torchscout, with its defaults, with checkpoints, in turn.

*free*: the host waits for the device every tenth step only, as a job that logs its loss does: what a user
pays. *synchronized*: it waits in every step: what single steps cost, such as the one after a check, whose
state is copied meanwhile. The windows with checkpoints contain the first capture.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from training_parts.job import Job

__all__ = ["end_to_end", "figures_of"]

INTERVAL = ReplayConfig().interval
STEPS = 3 * INTERVAL
MODES = ("default", "with checkpoints")
WAYS = {"free": 10, "synchronized": 1}
"""After how many steps the host waits for the device."""


def end_to_end(job: Job, rounds: int) -> list[dict[str, Any]]:
    """The windows in the order in which they were taken, each with the milliseconds of its steps."""
    taken: list[dict[str, Any]] = []
    for _ in range(rounds):
        for mode in MODES:
            for way, every in WAYS.items():
                taken.append({"mode": "without", "way": way, "ms": _steps(job, every)})
                checkpoint = CheckpointConfig(job.folder("checkpoints")) if mode == MODES[1] else None
                with job.attached(ReplayConfig(), ObserverConfig(), checkpoint) as session:
                    begins = session.step
                    ms = _steps(job, every)
                    held = (session.metrics()["checkpoint"] or {}).get("captures")
                taken.append({"mode": mode, "way": way, "ms": ms, "begins": begins, "captures": held})
                taken.append({"mode": "without", "way": way, "ms": _steps(job, every)})
    return taken


def _steps(job: Job, every: int) -> list[float]:
    job.steps(2)
    job.synchronize()
    dist.barrier()
    marks = [time.perf_counter()]
    for step in range(1, STEPS + 2):
        job.step()
        if step % every == 0:
            job.synchronize()
        marks.append(time.perf_counter())
    job.synchronize()
    marks[-1] = time.perf_counter()
    return [1e3 * (end - begin) for begin, end in itertools.pairwise(marks)]


def figures_of(ranks: Sequence[Sequence[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each window against its two neighbours, and single steps of synchronized ones; medians of rounds."""
    found: dict[str, dict[str, Any]] = {}
    noise: dict[str, list[float]] = {}
    rows: dict[str, dict[str, list[float]]] = {}
    for place, window in enumerate(ranks[0]):
        if window["mode"] == "without":
            continue
        way = window["way"]
        before, own, after = (_mean(ranks, at, lambda ms: ms) for at in (place - 1, place, place + 1))
        noise.setdefault(way, []).append(abs(before / after - 1))
        row = rows.setdefault(f"{window['mode']}, {way}", {})
        row.setdefault("step_ms", []).append(own)
        row.setdefault("ratio", []).append(2 * own / (before + after))
        if way == "synchronized":
            # Steps are numbered from 1; two have passed before the window.
            due = [at for at in range(STEPS) if (window["begins"] + 2 + at + 1) % INTERVAL == 0]
            kinds = {"check_ms": due, "after_check_ms": [at + 1 for at in due]}
            rest = [at for at in range(STEPS) if at not in {*due, *kinds["after_check_ms"]}]
            plain = _mean(ranks, place, lambda ms, rest=rest: [ms[at] for at in rest], statistics.median)
            for kind, places in kinds.items():
                for name, choose in ((kind, statistics.median), (f"first_{kind}", lambda ms: ms[0])):
                    extra = _mean(ranks, place, lambda ms, places=places: [ms[at] for at in places], choose)
                    row.setdefault(name, []).append(extra - plain)
    for mode, row in rows.items():
        found[mode] = {name: round(statistics.median(values), 3) for name, values in row.items()}
        found[mode] |= (
            {"first_after_check_ms": round(row["first_after_check_ms"][0], 3)} if "check_ms" in row else {}
        )
    for way, values in noise.items():
        found[f"noise of the windows without, {way}"] = {"ratio": round(statistics.median(values), 4)}
    return found


def _mean(
    ranks: Sequence[Sequence[dict[str, Any]]],
    place: int,
    chosen: Callable[[list[float]], list[float]],
    of: Callable[[list[float]], float] = statistics.fmean,
) -> float:
    return statistics.fmean(of(chosen(rank[place]["ms"])) for rank in ranks)
