"""What one rank measures: windows of steps with and without torchscout in turn, and parts of a check."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchscout.collectives.call import Call
from torchscout.collectives.interceptor import Pending, listen
from torchscout.config import ObserverConfig, ReplayConfig
from training_parts.breakdown import breakdown, device_waits
from training_parts.end_to_end import end_to_end
from training_parts.job import MODELS, Job
from training_parts.reference import reference

NEVER = 10**6
RECIPES = ("replicated_state", "embedding", "layer", "output", "optimizer", "process_groups")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, the same on every rank."""

    model: str
    device: str
    parallel: str
    parts: tuple[str, ...]
    rounds: int
    steps: int
    """Of one window; a multiple of ``interval``."""
    interval: int
    """Between checks, where their cost is measured."""
    run_dir: Path


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to attach."""

    replay: ReplayConfig | None
    observer: ObserverConfig | None
    interval: int = NEVER
    """Steps from one check to the next."""


def modes_of(plan: Plan) -> dict[str, Mode]:
    every, watched = plan.interval, ObserverConfig()
    modes = {
        "replay, nothing due": Mode(ReplayConfig(interval=NEVER), None),
        "observer": Mode(None, watched),
        "observer and replay, nothing due": Mode(ReplayConfig(interval=NEVER), watched),
        "check": Mode(ReplayConfig(interval=every), None, every),
    }
    if "recipes" in plan.parts:
        for name in RECIPES:
            modes[f"check of {name} alone"] = Mode(ReplayConfig(recipes={name: every}), None, every)
    if "default" in plan.parts:
        default = ReplayConfig()
        modes["default configuration"] = Mode(default, watched, default.interval)
    return modes


MODES = modes_of
PARTS = ("steps", "recipes", "default", "reference", "breakdown", "exchanges", "collectives", "end-to-end")


def measure(rank: int, plan: Plan) -> dict[str, Any]:
    """Everything that this rank found, raw."""
    job = Job(rank, MODELS[plan.model], plan.device, plan.parallel, plan.run_dir)
    job.steps(3)
    with job.attached(ReplayConfig(interval=1), ObserverConfig()):
        job.steps(4)  # compiles, connects, allocates
    found: dict[str, Any] = {"parameters": sum(each.numel() for each in job.model.parameters())}
    if {"steps", "recipes", "default"} & set(plan.parts):
        found["windows"] = _windows(job, plan)
    if "end-to-end" in plan.parts:
        found["end-to-end"] = end_to_end(job, plan.rounds)
    for name, run in (("reference", reference), ("exchanges", _exchanges), ("collectives", _collectives)):
        if name in plan.parts:
            found[name] = run(job)
    if "breakdown" in plan.parts:
        found["breakdown"] = breakdown(job, checks=12 if job.is_cuda else 4)
    return found


def _windows(job: Job, plan: Plan) -> list[dict[str, Any]]:
    """In the order in which they were taken; each one with torchscout is between two without."""
    taken: list[dict[str, Any]] = []

    def take(mode: str, steps: int, checks: int) -> None:
        window = job.window(steps)
        taken.append({"mode": mode, "steps": steps, "checks": checks, **asdict(window)})

    take("without", plan.steps, 0)
    for _ in range(plan.rounds):
        for name, mode in modes_of(plan).items():
            # A window begins right after a check, and ends with one.
            is_checked = mode.interval < NEVER
            steps = max(plan.steps, 2 * mode.interval) if is_checked else plan.steps
            with job.attached(mode.replay, mode.observer):
                job.steps(mode.interval if is_checked else 2)
                take(name, steps, steps // mode.interval)
            job.steps(2)
            take("without", plan.steps, 0)
    return taken


def _exchanges(job: Job) -> dict[str, Any]:
    """What one check communicates and how often it waits for the device; and the same of other steps."""
    found: dict[str, Any] = {}
    for name, interval in (("check", 1), ("nothing due", NEVER)):
        ear = _Ear()
        with job.attached(ReplayConfig(interval=interval), None):
            job.steps(3)
            with listen(ear):
                job.steps(6)
            found[name] = {
                "collectives": {key: count / 6 for key, count in sorted(ear.counted.items())},
                "bytes": {key: count / 6 for key, count in sorted(ear.bytes.items())},
                "waits_for_the_device": device_waits(job, 6) / 6,
            }
    job.steps(1)
    found["without"] = {"waits_for_the_device": device_waits(job, 6) / 6}
    return found


class _Ear:
    """Counts SCOUT's own collectives, by where they run."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def before(self, call: Call) -> None:
        where = call.tensors[0].device.type if call.tensors else "none"
        whose = "own" if call.group.is_scouts else "training's"
        key = f"{whose} {call.operation} on {where}"
        self.counted[key] += 1
        self.bytes[key] += sum(each.nbytes for each in call.tensors)

    def issued(self, call: Call, token: Any, pending: Pending | None) -> None:
        """Counted already."""


def _collectives(job: Job, calls: int = 200, rounds: int = 5) -> dict[str, Any]:
    """Microseconds that the host needs to issue an all-reduce, with and without an observer in turn."""
    small = torch.zeros(8, device=job.device)
    found: dict[str, list[float]] = {"without": [], "observer": []}
    ear = _Ear()
    with listen(ear):
        job.step()

    def issue() -> float:
        job.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(small)
        took = time.perf_counter() - begin
        job.synchronize()
        return 1e6 * took / calls

    issue()
    for _ in range(rounds):
        found["without"].append(issue())
        with job.attached(None, ObserverConfig()):
            job.steps(1)
            found["observer"].append(issue())
    return {"us": found, "in_a_step": sum(ear.counted.values())}
