"""Whole jobs as a user runs them: windows without torchscout, with its defaults, with checkpoints, in turn;
and, to compare with, jobs without torchscout that copy their state to pinned memory as often.

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

import torch
import torch.distributed as dist

from torchscout.config import CheckpointConfig, ObserverConfig, ReplayConfig
from torchscout.utils._torch import local_of
from training_parts.job import Job

__all__ = ["end_to_end", "figures_of"]

INTERVAL = ReplayConfig().interval
STEPS = 3 * INTERVAL
WAYS = {"free": 10, "synchronized": 1}
"""After how many steps the host waits for the device."""


def end_to_end(job: Job, rounds: int) -> list[dict[str, Any]]:
    """The windows in the order in which they were taken, each with the milliseconds of its steps."""
    taken: list[dict[str, Any]] = []
    for _ in range(rounds):
        for way, every in WAYS.items():
            for take in (_copied, _with_defaults, _with_checkpoints):
                taken.append({"mode": "without", "way": way, "ms": _steps(job, every)})
                taken.append({"way": way, **take(job, every)})
            taken.append({"mode": "without", "way": way, "ms": _steps(job, every)})
    return taken


def _with_defaults(job: Job, every: int) -> dict[str, Any]:
    with job.attached(ReplayConfig(), ObserverConfig()) as session:
        return {"mode": "default", "begins": session.step, "ms": _steps(job, every)}


def _with_checkpoints(job: Job, every: int) -> dict[str, Any]:
    checkpoint = CheckpointConfig(job.folder("checkpoints"))
    with job.attached(ReplayConfig(), ObserverConfig(), checkpoint) as session:
        found = {"mode": "with checkpoints", "begins": session.step, "ms": _steps(job, every)}
        return {**found, "captures": (session.metrics()["checkpoint"] or {}).get("captures")}


def _copied(job: Job, every: int) -> dict[str, Any]:
    """The same bytes as a capture, when it would take them, and the update waits for the copies."""
    slots = (each for state in job.optimizer.state.values() for each in state.values())
    held = [local_of(each.detach()) for each in (*job.model.parameters(), *slots)]
    rooms = [torch.empty_like(each, device="cpu", pin_memory=job.is_cuda) for each in held]
    if not job.is_cuda:
        ms = _steps(job, every, lambda: torch._foreach_copy_(rooms, held))
        return {"mode": "plain copies", "begins": 0, "ms": ms}
    side = torch.cuda.Stream()

    def copy() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for room, each in zip(rooms, held, strict=True):
                room.copy_(each, non_blocking=True)

    hook = job.optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_stream(side))
    try:
        return {"mode": "plain copies", "begins": 0, "ms": _steps(job, every, copy)}
    finally:
        hook.remove()


def _steps(job: Job, every: int, after_check: Callable[[], Any] = lambda: None) -> list[float]:
    """Two steps pass before the window."""
    job.steps(2)
    job.synchronize()
    dist.barrier()
    marks = [time.perf_counter()]
    for step in range(1, STEPS + 2):
        if step > 1 and (step + 1) % INTERVAL == 0:
            after_check()
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
