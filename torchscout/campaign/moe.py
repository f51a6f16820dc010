"""Cells with a mixture of experts."""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from torchscout.attach import enable_resiliency
from torchscout.campaign.cell import Cell, JobLayout
from torchscout.campaign.grading import Flaw, Grade, grade, unfired
from torchscout.campaign.observed import retried
from torchscout.campaign.paper_cells import SHAPES, Turns
from torchscout.campaign.results import Result, found_in
from torchscout.campaign.training import device_of
from torchscout.config import ReplayConfig, StragglerConfig
from torchscout.decision.record import Incident
from torchscout.decision.recorder import IncidentLog
from torchscout.experts.kernel import expert_layer as counted
from torchscout.experts.kernel.triton_kernel import INTERPRETED
from torchscout.faults.effects import PerturbKernel
from torchscout.faults.injector import Firing, Injector
from torchscout.faults.plan import FaultPlan
from torchscout.testing.local_ranks import RankError, run_ranks
from torchscout.testing.moe_model import HIDDEN, LAYERS, WIDTH, Experts, MoeTraining, catalog_for

__all__ = [
    "PROGRAMS",
    "TILE",
    "Job",
    "MoeRankResult",
    "hasten",
    "in_its_turn",
    "run_job",
    "run_routed",
    "train",
]


def hasten() -> None:
    """Leave out its checks for overflow of integers, which take most of its time; no result changes."""
    if INTERPRETED:
        from triton.runtime.interpreter import interpreter_builder

        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


PROGRAMS, TILE = 2, (16, 16, 16, 2)
"""Of the interpreted kernel: rows and columns of a tile, a step, and row tiles that are done together."""
_EVER = 1e9
"""Milliseconds."""


@dataclass(frozen=True, slots=True)
class Job:
    """How long ranks train, and on what."""

    steps: int
    catalog: Path
    layers: int = LAYERS
    is_kernel: bool = False
    """Whether experts run on the grouped GEMM whose paths are counted."""
    is_interpreted: bool = True
    """Whether that is in Triton's interpreter, with small tiles, or on the device as it is used there."""

    @property
    def replay(self) -> ReplayConfig:
        """Experts alone, shape by shape. A kernel that falls ill is another program, and not as fast."""
        straggler = StragglerConfig(min_slowdown_ms=_EVER) if self.is_kernel else StragglerConfig()
        return ReplayConfig(interval=1, recipes=("experts",), catalog=self.catalog, straggler=straggler)


@dataclass(frozen=True, slots=True)
class MoeRankResult:
    """What one rank has to tell."""

    fired: list[Firing]
    failures: list[str]
    cycles: int
    """Over all shapes and layers, of checks that were accepted."""
    applied: int
    """How often the kernel says that it was perturbed."""


def train(
    rank: int, layout: JobLayout, faults: FaultPlan, run_dir: Path, seed: int, job: Job
) -> MoeRankResult:
    """A check after each step, of experts alone: a census of all weights would not need their shapes."""
    logging.getLogger("torchscout").addHandler(logging.NullHandler())  # the campaign tells what was found
    warnings.filterwarnings("ignore", module="torch")  # of nothing that a small job could do about
    make = _on_kernel(is_interpreted=job.is_interpreted) if job.is_kernel else Experts
    training = MoeTraining(layout.mesh(), seed, layers=job.layers, make=make, device=device_of(layout))
    with (
        Injector(faults, rank, training.model, training.optimizer) as injector,
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=job.replay,
            observer=None,
            parallelism=training.parallelism,
            run_dir=run_dir,
        ) as session,
    ):
        for step in range(1, job.steps + 1):
            training.step(step)
        replay = session.status()["replay"]
        failures = [*session.failures, *([replay["lacking"]] if replay["lacking"] else [])]
        if not faults:  # where state differs, what is computed from it is not compared
            unchecked = replay["not_checked"]
            failures += [f"{surface} is not checked: {reason}" for surface, reason in unchecked.items()]
        cycles = replay["coverage"]["experts"]["cycles"]
        return MoeRankResult(injector.fired, failures, cycles, _applied() if job.is_kernel else 0)


def _on_kernel(*, is_interpreted: bool) -> Callable[[int], nn.Module]:
    """Makes experts on a grouped GEMM that may fall ill; Triton is needed here alone."""
    # moved
    from torchscout.experts.kernel.grouped_gemm import Tiling, programs_of
    from torchscout.faults.faulty_gemm import FaultyGemm

    def gemm(hidden: int, intermediate: int, device: torch.device) -> FaultyGemm:
        if is_interpreted:
            return FaultyGemm(hidden, intermediate, programs=PROGRAMS, tiling=Tiling(*TILE))
        return FaultyGemm(hidden, intermediate, programs=programs_of(device))

    hasten()
    return lambda count: counted.Experts(count, WIDTH, HIDDEN, gemm=gemm)


def _applied() -> int:
    from torchscout.faults.faulty_gemm import times_applied

    return times_applied()


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


def _profile(rank: int, layout: JobLayout, catalog: Path) -> None:  # noqa: ARG001  as ranks are called
    """In a process of its own: the campaign's has nothing to do on a device."""
    catalog_for(layout.experts, SHAPES, catalog, device=layout.device)


def run_job(cell: Cell, place: Path, job: Job, turns: Turns) -> Result:
    """One cell; ``turns`` are those of the job's catalog."""
    shutil.rmtree(place, ignore_errors=True)  # of a run that was interrupted
    begin, reports, told, failures = (
        time.monotonic(),
        IncidentLog(place, strict=True),
        list[MoeRankResult](),
        list[str](),
    )
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


def _trained(cell: Cell, place: Path, job: Job) -> list[MoeRankResult]:
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


def _unfired(cell: Cell, told: Sequence[MoeRankResult]) -> list[str]:
    """By the injector, and where the kernel is perturbed by the kernel's own count."""
    happened = {(firing.rank, firing.at) for each in told for firing in each.fired}
    idle = [fault.rank for fault in cell.faults if isinstance(fault.effect, PerturbKernel)]
    idle = [rank for rank in idle if not told[rank].applied]
    return [*unfired(cell.faults, happened), *(f"a wrong work item of rank {rank}" for rank in idle)]


def in_its_turn(
    cell: Cell, told: Sequence[MoeRankResult], incidents: Sequence[Incident], turns: Turns
) -> Grade:
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
