"""Feeds the times of ``test_stragglers`` to today's diagnoses, by way of the messages that ranks exchange."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tests.scenarios.rows import Finding
from tests.support.ranks import run_ranks
from tests.support.replayed_job import checked_training
from torchscout.c3.tree import Runs
from torchscout.config import BaselineConfig, ObserverConfig, StragglerConfig
from torchscout.decision.baseline import Stragglers
from torchscout.decision.progress import Phase
from torchscout.decision.straggler import PhaseStragglers
from torchscout.decision.timings import Timings
from torchscout.decision.types import Action, Incident, Manifestation
from torchscout.faults.plan import FaultPlan
from torchscout.mesh import Mesh, MeshAddress
from torchscout.replay.recipe import Lap, Measured
from torchscout.session.replay.time_comparison import decode, encode

if TYPE_CHECKING:
    from tests.scenarios.test_stragglers import Job, Layout, Phases, RealJob, Recorded, Times

ACTIONS = {Action.INSPECT: "inspect", Action.REPLACE: "replace", Action.CONTINUE: "continue"}
SURFACES = {"forward": "time/module", "backward": "time/module_backward"}
PHASES = {
    "input": Phase.INPUT,
    "checkpoint read": Phase.CHECKPOINT_READ,
    "checkpoint write": Phase.CHECKPOINT_WRITE,
}
ELEMENTS = 4096
"""What a rank transfers for each token; other sizes of transfers are other work."""
TIMED_AGAIN = 3
"""A layer that would be reported as slow is repeated so often, and the shortest time counts."""


def found(job: Job | Recorded) -> list[Finding]:
    stragglers = _new(job.layout)
    return [finding_of(each) for found in _observed(job, stragglers) for each in found]


def remembered(job: Job) -> tuple[int, int]:
    """How many bytes the state of the diagnoses has after half of the checks, and after all."""
    stragglers = _new(job.layout)
    half, whole = 0, 0
    for number, _ in enumerate(_observed(job, stragglers), 1):
        if 2 * number == len(job.history):
            half = len(pickle.dumps(stragglers))
        whole = len(pickle.dumps(stragglers)) if number == len(job.history) else 0
    return half, whole


def found_in_phases(given: Phases) -> list[Finding]:
    config = replace(StragglerConfig(), min_slowdown_ms=ObserverConfig().phase_ms)
    diagnosis, phase = PhaseStragglers(mesh_of(given.layout), config), PHASES[given.phase]
    surveys = (
        {rank: took for rank, took in enumerate(survey) if took is not None} for survey in given.surveys
    )
    incidents = (diagnosis.observe(step, {phase: survey}) for step, survey in enumerate(surveys, 1))
    return [finding_of(each) for each in chain.from_iterable(incidents)]


def found_in_training(given: RealJob, run_dir: Path) -> list[Finding]:
    faults = FaultPlan()
    for layer in range(given.layers):
        at = f"stack.{layer}/forward"
        faults = faults.delay(
            rank=given.slow_rank, at=at, step=given.slow_steps, seconds=0.25, calls=None
        )  # in training's pass and in those of checks
    results = run_ranks(checked_training, given.ranks, faults, given.steps, [], run_dir, timeout=120)
    assert len(results[given.slow_rank].fired) >= given.layers * len(given.slow_steps)
    assert [each.failures for each in results] == [[]] * given.ranks
    return [finding_of(each) for each in results[0].incidents]


def finding_of(incident: Incident) -> Finding:
    assert incident.manifestation is Manifestation.STRAGGLER, incident.sentence
    scope = incident.scope.value.replace("_", " ")
    return Finding("straggler", tuple(incident.ranks), scope, ACTIONS[incident.action])


def mesh_of(layout: Layout) -> Mesh:
    return Mesh([MeshAddress(**each) for each in layout.coordinates], list(layout.machines))


def _new(layout: Layout) -> Stragglers:
    return Stragglers(mesh_of(layout), 0, StragglerConfig(), BaselineConfig())


def _observed(job: Job | Recorded, stragglers: Stragglers) -> Iterator[list[Incident]]:
    """What is reported after each check."""
    mesh = mesh_of(job.layout)
    for step, measure in enumerate(job.play(), 1):
        times = measure()
        timings = _received(step, times, mesh)
        if stragglers.layers_to_time_again(timings):
            repeated = zip(times, *(measure() for _ in range(TIMED_AGAIN)), strict=True)
            timings = _received(step, [_shortest(each) for each in repeated], mesh)
        yield [*stragglers.observe(timings).incidents]


def _shortest(times: Sequence[Times | None]) -> Times | None:
    """Of one rank. What it communicates counts as it was the first time."""
    first, *again = times
    if first is None:
        return None
    computing = {
        name: min(took, *(each.computing[name] for each in again if each is not None))
        for name, took in first.computing.items()
    }
    return first._replace(computing=computing)


def _received(step: int, times: Sequence[Times | None], mesh: Mesh) -> Timings:
    """What every rank receives from all of them."""
    sent = [encode([] if each is None else [_measured(each)], mesh) for each in times]
    layouts, columns = (Runs.joined([Runs.of(each) for each in part]) for part in zip(*sent, strict=True))
    return decode(step, mesh, Runs.decode(layouts.encode()), Runs.decode(columns.encode()))


def _measured(times: Times) -> Measured:
    elements = ELEMENTS * times.length
    laps = [
        Lap("time/all_reduce@", group.members, elements, (took,))
        for group, took in times.communicating.items()
    ]
    computing = {SURFACES[name]: took for name, took in times.computing.items()}
    return Measured(times.layer, (times.length,), computing, laps)
