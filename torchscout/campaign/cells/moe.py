"""Cells with a mixture of experts."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from torchscout.attach import enable_resiliency
from torchscout.campaign.cells.cell import Cell, JobLayout
from torchscout.campaign.cells.paper_cells import SHAPES, Turns
from torchscout.campaign.cells.training import device_of, replay_on, retried, silence_log
from torchscout.campaign.grading import Flaw, Grade, unfired
from torchscout.campaign.results import Result, graded
from torchscout.config import ReplayConfig, StragglerConfig
from torchscout.decision.types import Incident
from torchscout.experts.kernel import expert_layer as counted
from torchscout.experts.kernel.triton_kernel import INTERPRETED
from torchscout.faults.effects import PerturbKernel
from torchscout.faults.injector import Firing, Injector
from torchscout.faults.plan import FaultPlan
from torchscout.run.reader import IncidentLog
from torchscout.testing.local_ranks import RankError, run_ranks
from torchscout.testing.moe_model import HIDDEN, LAYERS, WIDTH, Experts, MoeTraining, catalog_for

__all__ = [
    "PROGRAMS",
    "TILE",
    "Job",
    "MoeRankResult",
    "in_its_turn",
    "run_job",
    "run_routed",
    "speed_up_interpreter",
    "train",
]


def speed_up_interpreter() -> None:
    """Skip the integer overflow checks of Triton's interpreter, which take most of its time."""
    if INTERPRETED:
        from triton.runtime.interpreter import interpreter_builder

        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


PROGRAMS, TILE = 2, (16, 16, 16, 2)
"""Of the interpreted kernel: rows and columns of a tile, a step, and row tiles that are done together."""
_NEVER_SLOW_MS = 1e9


@dataclass(frozen=True, slots=True)
class Job:
    """How long ranks train, and which experts."""

    steps: int
    catalog: Path
    layers: int = LAYERS
    is_kernel: bool = False
    """Whether experts run on the grouped GEMM that counts its paths."""
    is_interpreted: bool = True
    """Whether that runs in Triton's interpreter, with small tiles, or is compiled for the device."""

    @property
    def replay(self) -> ReplayConfig:
        """Replay experts only, shape by shape. A perturbed kernel is another program, and slower."""
        straggler = StragglerConfig(min_slowdown_ms=_NEVER_SLOW_MS) if self.is_kernel else StragglerConfig()
        return ReplayConfig(
            interval=1, recipes=("experts",), expert_catalog=self.catalog, straggler=straggler
        )


@dataclass(frozen=True, slots=True)
class MoeRankResult:
    """What one rank returns."""

    fired: list[Firing]
    failures: list[str]
    cycles: int
    """Complete cycles of accepted checks over all shapes and layers."""
    applied: int
    """How often the kernel was perturbed, by its own count."""


def train(
    rank: int, layout: JobLayout, faults: FaultPlan, run_dir: Path, seed: int, job: Job
) -> MoeRankResult:
    """Train with a check of the experts after each step."""
    silence_log()
    warnings.filterwarnings("ignore", module="torch")  # a small job cannot do anything about them
    make = _on_kernel(is_interpreted=job.is_interpreted) if job.is_kernel else Experts
    training = MoeTraining(layout.mesh(), seed, layers=job.layers, make=make, device=device_of(layout))
    with (
        Injector(faults, rank, training.model, training.optimizer) as injector,
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=replay_on(layout, job.replay),
            observer=None,
            parallelism=training.parallelism,
            run_dir=run_dir,
        ) as session,
    ):
        for step in range(1, job.steps + 1):
            training.step(step)
        replay = session.status()["replay"]
        failures = [*session.failures, *([replay["lacking"]] if replay["lacking"] else [])]
        if not faults:  # where state differs, results computed from it are not compared
            unchecked = replay["not_checked"]
            failures += [f"{surface} is not checked: {reason}" for surface, reason in unchecked.items()]
        cycles = replay["coverage"]["experts"]["cycles"]
        if not job.is_kernel:
            return MoeRankResult(injector.fired, failures, cycles, 0)
        from torchscout.faults.faulty_gemm import times_applied

        return MoeRankResult(injector.fired, failures, cycles, times_applied())


def _on_kernel(*, is_interpreted: bool) -> Callable[[int], nn.Module]:
    """A factory of experts on a grouped GEMM that can be perturbed. Only this needs Triton."""
    from torchscout.experts.kernel.grouped_gemm import Tiling, programs_of
    from torchscout.faults.faulty_gemm import FaultyGemm

    def gemm(hidden: int, intermediate: int, device: torch.device) -> FaultyGemm:
        if is_interpreted:
            return FaultyGemm(hidden, intermediate, programs=PROGRAMS, tiling=Tiling(*TILE))
        return FaultyGemm(hidden, intermediate, programs=programs_of(device))

    speed_up_interpreter()
    return lambda count: counted.Experts(count, WIDTH, HIDDEN, gemm=gemm)


_SECONDS = 300.0
_CYCLES = 3
"""The first cycle is clean, and so are the others in a cell without a fault. By the third, the first layer
has been replayed at both shapes."""


def run_routed(cells: Sequence[Cell], folder: Path) -> Generator[Result, None, None]:
    """Run one cell after another; the evidence of those that fail stays in ``folder``."""
    turns, catalog, layout = Turns(SHAPES, LAYERS), folder / "catalog.json", cells[0].place
    folder.mkdir(parents=True, exist_ok=True)
    retried(lambda: run_ranks(_profile, 1, layout, catalog, timeout=_SECONDS))
    for cell in cells:
        yield run_job(cell, folder / cell.name, Job(_CYCLES * len(turns), catalog), turns)


def _profile(rank: int, layout: JobLayout, catalog: Path) -> None:  # noqa: ARG001  as ranks are called
    """Save a catalog. Runs in its own process, since the campaign's must not use a device."""
    catalog_for(layout.experts, SHAPES, catalog, device=layout.device)


def run_job(cell: Cell, place: Path, job: Job, turns: Turns) -> Result:
    """Run one cell; ``turns`` are those of the job's catalog."""
    shutil.rmtree(place, ignore_errors=True)  # left by an interrupted run
    begin, layout, reports = time.monotonic(), cell.place, IncidentLog(place)
    answers, failures = list[MoeRankResult](), list[str]()
    args = (train, layout.ranks, layout, cell.faults, place, cell.seed, job)
    try:
        answers = retried(partial(run_ranks, *args, timeout=_SECONDS, backend=layout.backend))
    except RankError as error:
        failures = [error.in_short]
    result = graded(
        cell,
        reports.new(),
        [firing for each in answers for firing in each.fired],
        time.monotonic() - begin,
        unfired=_unfired(cell, answers) if answers else (),
        failures=[*failures, *(failure for each in answers for failure in each.failures)],
        further=lambda incidents: in_its_turn(cell, answers, incidents, turns),
    )
    if result.grade.passed:
        shutil.rmtree(place, ignore_errors=True)
    return result


def _unfired(cell: Cell, answers: Sequence[MoeRankResult]) -> list[str]:
    """Faults that did not happen by the injector's count, or by the kernel's own where it is perturbed."""
    happened = {(firing.rank, firing.at) for each in answers for firing in each.fired}
    idle = [fault.rank for fault in cell.faults if isinstance(fault.effect, PerturbKernel)]
    idle = [rank for rank in idle if not answers[rank].applied]
    return [*unfired(cell.faults, happened), *(f"a wrong work item of rank {rank}" for rank in idle)]


def in_its_turn(
    cell: Cell, answers: Sequence[MoeRankResult], incidents: Sequence[Incident], turns: Turns
) -> Grade:
    """Whether a clean cycle came before the fault, and the fault was found when its shape was replayed."""
    first = min((fault.steps[0] for fault in cell.faults), default=None)
    wanted = _CYCLES if first is None else (first - 1) // len(turns)
    if {each.cycles for each in answers} != {wanted}:
        cycles = sorted({each.cycles for each in answers})
        return Grade(Flaw.BROKEN, f"ranks completed {cycles} clean cycles of the catalog, not {wanted}")
    for incident in incidents:
        assert first is not None, "a cell without a fault has passed only without incidents"
        at, due = incident.records[0].layer, turns.target(first)
        if (incident.step, at) != (first, due):
            reason = f"found at {at} after step {incident.step}, not at {due} after step {first}"
            return Grade(Flaw.WRONG_NAME, reason)
    return Grade()
