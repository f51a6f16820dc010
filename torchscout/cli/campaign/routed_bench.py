"""Runs cells that train a mixture of experts, each on ranks of its own (paper, evaluation)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from torchscout.cli.campaign.cell import Cell
from torchscout.cli.campaign.grading import Flaw, Grade, grade, unfired
from torchscout.cli.campaign.layout import Layout
from torchscout.cli.campaign.reports import Reports
from torchscout.cli.campaign.result import Result, found_in
from torchscout.cli.campaign.routed import SHAPES, Turns
from torchscout.cli.campaign.routed_job import Job, Told, train
from torchscout.cli.campaign.starting import retried
from torchscout.cli.local_ranks import RankError, run_ranks
from torchscout.cli.moe_catalog import catalog_for
from torchscout.cli.moe_model import LAYERS
from torchscout.decision.record import Incident
from torchscout.faults.effects import PerturbKernel

__all__ = ["in_its_turn", "run_job", "run_routed"]

_SECONDS = 300.0
_REASON_CHARACTERS = 600
_CYCLES = 2
"""The first is clean, and so is the second where there is no fault."""


def run_routed(cells: Sequence[Cell], folder: Path) -> Generator[Result, None, None]:
    """One after another; the evidence of those that fail stays in ``folder``."""
    turns, catalog, layout = Turns(SHAPES, LAYERS), folder / "catalog.json", cells[0].place
    folder.mkdir(parents=True, exist_ok=True)
    retried(lambda: run_ranks(_profile, 1, layout, catalog, timeout=_SECONDS))
    for cell in cells:
        yield run_job(cell, folder / cell.name, Job(_CYCLES * len(turns), catalog), turns)


def _profile(rank: int, layout: Layout, catalog: Path) -> None:  # noqa: ARG001  as ranks are called
    """In a process of its own: the campaign's has nothing to do on a device."""
    catalog_for(layout.experts, SHAPES, catalog, device=layout.device)


def run_job(cell: Cell, place: Path, job: Job, turns: Turns) -> Result:
    """One cell; ``turns`` are those of the job's catalog."""
    shutil.rmtree(place, ignore_errors=True)  # of a run that was interrupted
    begin, reports, told, failures = time.monotonic(), Reports(place), list[Told](), list[str]()
    try:
        told = retried(lambda: _trained(cell, place, job))
    except RankError as error:
        failures = [error.in_short[:_REASON_CHARACTERS]]
    found = reports.new()
    incidents = [each.item for each in found if isinstance(each.item, Incident)]
    fired = [firing for each in told for firing in each.fired]
    given = grade(
        cell.truths,
        unfired=_unfired(cell, told) if told else (),
        incidents=incidents,
        failures=[*failures, *(failure for each in told for failure in each.failures)],
    )
    if given.passed:
        given = in_its_turn(cell, told, incidents, turns)
    if given.passed:
        shutil.rmtree(place, ignore_errors=True)
    return found_in(
        cell,
        given,
        found,
        happened=min((each.monotonic for each in fired), default=None),
        took_seconds=time.monotonic() - begin,
        detail=fired[0].detail if fired else "",
    )


def _trained(cell: Cell, place: Path, job: Job) -> list[Told]:
    layout = cell.place
    return run_ranks(
        train,
        layout.ranks,
        layout,
        cell.faults,
        place,
        cell.seed,
        job,
        timeout=_SECONDS,
        backend=layout.backend,
    )


def _unfired(cell: Cell, told: Sequence[Told]) -> list[str]:
    """By the injector, and where the kernel is perturbed by the kernel's own count."""
    happened = {(firing.rank, firing.at) for each in told for firing in each.fired}
    idle = [fault.rank for fault in cell.faults if isinstance(fault.effect, PerturbKernel)]
    idle = [rank for rank in idle if not told[rank].applied]
    return [*unfired(cell.faults, happened), *(f"a wrong work item of rank {rank}" for rank in idle)]


def in_its_turn(cell: Cell, told: Sequence[Told], incidents: Sequence[Incident], turns: Turns) -> Grade:
    """Whether there was a whole clean cycle before the fault, which was found at the shape that was due."""
    first = min((fault.steps[0] for fault in cell.faults), default=None)
    wanted = _CYCLES if first is None else (first - 1) // len(turns)
    if {each.cycles for each in told} != {wanted}:
        cycles = sorted({each.cycles for each in told})
        return Grade(Flaw.BROKEN, f"ranks went through {cycles} clean cycles of the catalog, not {wanted}")
    for incident in incidents:
        step = min(fault.steps[0] for fault in cell.faults)
        at, due = incident.records[0].layer, turns.target(step)
        if (incident.step, at) != (step, due):
            reason = f"found at {at} after step {incident.step}, not at {due} after step {step}"
            return Grade(Flaw.WRONG_NAME, reason)
    return Grade()
