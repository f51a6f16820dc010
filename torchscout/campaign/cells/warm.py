"""Runs many cells one after another in ranks that stay alive."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from torchscout.attach import enable_resiliency
from torchscout.campaign.cells.cell import Cell, JobLayout
from torchscout.campaign.cells.training import replay_on, retried, silence_log, training_of
from torchscout.campaign.grading import Flaw, unfired
from torchscout.campaign.results import Result, graded
from torchscout.config import ReplayConfig
from torchscout.faults.fault import SiteKind
from torchscout.faults.injector import Firing, Injector
from torchscout.faults.plan import Fault, FaultPlan
from torchscout.run.reader import IncidentLog
from torchscout.testing.local_ranks import LiveRanks, RankError
from torchscout.testing.transformer import TINY

__all__ = [
    "EVERY_STEP",
    "WARMUP",
    "Judge",
    "Slot",
    "Stretch",
    "WarmRankResult",
    "planned",
    "run_warm",
    "scheduled",
    "train",
]

WARMUP = 4
"""Steps before the first cell, since first replays are slow. The last one is the first cell's clean step."""
_CLEAN_STEPS = 2
"""Steps of a cell without faults, besides the clean step before it."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The training steps that belong to one cell."""

    cell: Cell
    first: int
    """Incidents from this step on belong to the cell."""
    last: int
    faults: FaultPlan = field(default_factory=FaultPlan)
    """The cell's faults, in training steps."""
    restored_after: int | None = None
    """The step after which all ranks restore the state from before it, if the fault corrupts state."""
    waits: int = 0
    """Idle steps until replay comes to the layer that the cell needs."""


def scheduled(cells: Sequence[Cell], layers: int) -> list[Slot]:
    """A slot for every cell. The next one is always the cell with the fewest idle steps."""
    left, slots = list(cells), list[Slot]()
    while left:
        done = slots[-1].last if slots else WARMUP
        candidates = [_slot(cell, slots[-1].last if slots else 0, done, layers) for cell in left]
        soonest = min(candidates, key=lambda slot: slot.waits)
        slots.append(soonest)
        left.remove(soonest.cell)
    return slots


def planned(slots: Sequence[Slot]) -> FaultPlan:
    """The faults of all slots."""
    return FaultPlan(tuple(fault for slot in slots for fault in slot.faults))


def _slot(cell: Cell, before: int, done: int, layers: int) -> Slot:
    if not cell.faults:
        return Slot(cell, before + 1, done + _CLEAN_STEPS)
    begin, offset, waits = min(fault.steps[0] for fault in cell.faults), done - 1, 0
    assert begin > 1, f"{cell.identity} has no clean step before its fault"
    while cell.due is not None and (offset + waits + begin - 1) % layers != cell.due:
        waits += 1
    moved = FaultPlan(tuple(_later(fault, offset + waits) for fault in cell.faults))
    end = max(fault.steps[-1] for fault in moved)
    spoils = any(fault.place.kind is SiteKind.STATE for fault in moved)
    return Slot(cell, before + 1, end + 1, moved, end if spoils else None, waits)


def _later(fault: Fault, steps: int) -> Fault:
    assert isinstance(fault.when, range), "a cell's faults have fixed steps"
    return replace(fault, when=range(fault.when.start + steps, fault.when.stop + steps, fault.when.step))


EVERY_STEP = ReplayConfig(interval=1)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A request to ranks: train up to and including step ``last``."""

    last: int
    restored_after: int | None = None
    """Restore the state from before this step after it."""


@dataclass(frozen=True, slots=True)
class WarmRankResult:
    """What one rank returns for a stretch."""

    fired: list[Firing]
    failures: list[str]
    step_seconds: dict[int, float] = field(default_factory=dict)
    """The duration of each step on this rank, without checks: what a rank knows without replay."""


def train(
    rank: int,
    stretches: Iterator[Stretch],
    layout: JobLayout,
    faults: FaultPlan,
    run_dir: Path,
    seed: int,
    replay: ReplayConfig = EVERY_STEP,
) -> Iterator[WarmRankResult]:
    """Continue one training from stretch to stretch."""
    silence_log()
    training = training_of(layout, seed)
    with (
        Injector(faults, rank, training.net, training.optimizer) as injector,
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=replay_on(layout, replay),
            observer=None,
            parallelism=layout.mesh() if layout.apart else None,
            run_dir=run_dir,
        ) as session,
    ):
        timer = _StepTimer(training.optimizer)
        for stretch in stretches:
            fired, failed = len(injector.fired), len(session.failures)
            timer.seconds.clear()
            for step in range(session.step + 1, stretch.last + 1):
                is_restored = step == stretch.restored_after
                saved = [each.clone() for each in training.state()] if is_restored else []
                timer.begin(step)
                training.step(step)
                for each, before in zip(training.state(), saved, strict=True) if is_restored else ():
                    each.copy_(before)
            stopped = [off] if (off := (session.status()["replay"] or {}).get("off")) else []
            yield WarmRankResult(
                injector.fired[fired:], [*session.failures[failed:], *stopped], dict(timer.seconds)
            )


class _StepTimer:
    """Times each step up to its optimizer step, where a check begins."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seconds: dict[int, float] = {}
        self._step, self._began = 0, 0.0
        optimizer.register_step_pre_hook(lambda *_: self._end())

    def begin(self, step: int) -> None:
        self._step, self._began = step, time.perf_counter()

    def _end(self) -> None:
        self.seconds[self._step] = time.perf_counter() - self._began


_REPLACED = "the ranks failed, and were replaced"
_SECONDS = 120.0
"""The time limit of a cell, on a machine that is busy with other things."""


class Judge(Protocol):
    """Decides the same cells from the same evidence, by other rules."""

    def judge(self, slot: Slot, answers: Sequence[WarmRankResult], run_dir: Path) -> Mapping[str, str]:
        """Called after each cell of the same ranks, in order."""
        ...


def run_warm(
    cells: Sequence[Cell],
    folder: Path,
    seed: int,
    *,
    replay: ReplayConfig = EVERY_STEP,
    judge: Callable[[JobLayout], Judge] | None = None,
) -> Generator[Result, None, None]:
    """Run cells of one layout. The evidence of cells that fail stays in ``folder``.

    ``replay`` must check at every step. With ``judge``, each set of ranks gets a new one.
    """
    left, run, layout = list(cells), 0, cells[0].place
    while left:
        run += 1
        results: list[Result] = []
        run_dir = folder / f"run-{run}"
        body = partial(train, replay=replay)
        for result in _run(left, run_dir, seed, body, None if judge is None else judge(layout)):
            results.append(result)
            yield result
        done = {each.cell for each in results}
        left = [cell for cell in left if cell.identity not in done]
        if all(each.grade.passed for each in results):
            shutil.rmtree(run_dir / "records", ignore_errors=True)


def _run(
    cells: Sequence[Cell],
    run_dir: Path,
    seed: int,
    body: Callable[..., Iterator[WarmRankResult]],
    judge: Judge | None,
) -> Generator[Result, None, None]:
    """Run cells until all are done, or the ranks cannot be used for the next one."""
    slots, layout = scheduled(cells, TINY.layers), cells[0].place
    reports, begin = IncidentLog(run_dir), time.monotonic()
    try:
        started = retried(lambda: _started(body, layout, planned(slots), run_dir, seed))
    except RankError as error:
        yield Result.broken(slots[0].cell, _REPLACED, error.in_short, time.monotonic() - begin)
        return
    with started as ranks:
        for slot in slots:
            begin = time.monotonic()
            try:
                answers = ranks.ask(Stretch(slot.last, slot.restored_after), timeout=_SECONDS)
            except RankError as error:
                yield Result.broken(slot.cell, _REPLACED, error.in_short, time.monotonic() - begin)
                return
            result = _graded(slot, answers, reports, time.monotonic() - begin)
            if judge is not None:
                result = replace(result, ablated=judge.judge(slot, answers, run_dir))
            yield result
            if result.grade.flaw is Flaw.BROKEN or any(each.step == slot.last for each in result.found):
                return  # the clean step was not clean, and the next cell would be affected


def _started(
    body: Callable[..., Iterator[WarmRankResult]],
    layout: JobLayout,
    faults: FaultPlan,
    run_dir: Path,
    seed: int,
) -> LiveRanks:
    """Start the ranks; on CUDA, wait until they are ready."""
    with ExitStack() as undo:
        ranks = LiveRanks(body, layout.ranks, layout, faults, run_dir, seed, backend=layout.backend)
        undo.callback(ranks.close)
        if layout.device == "cuda":  # a busy device refuses new processes, and the start is retried
            ranks.ask(Stretch(0), timeout=_SECONDS)
        undo.pop_all()
    return ranks


def _graded(slot: Slot, answers: Sequence[WarmRankResult], reports: IncidentLog, took: float) -> Result:
    fired = [firing for each in answers for firing in each.fired]
    missing = unfired(slot.faults, {(firing.rank, firing.at) for firing in fired})
    failures = [failure for each in answers for failure in each.failures]
    return graded(slot.cell, reports.new(), fired, took, unfired=missing, failures=failures)
