"""Many cells, one after another, in ranks that stay alive."""

from __future__ import annotations

import logging
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
from torchscout.campaign.cell import BLOCKS, Cell, JobLayout
from torchscout.campaign.grading import Flaw, Grade, Reports, grade, unfired
from torchscout.campaign.observed import retried
from torchscout.campaign.results import Result, found_in
from torchscout.campaign.training import Training
from torchscout.config import ReplayConfig
from torchscout.decision.record import Incident
from torchscout.faults.fault import SiteKind
from torchscout.faults.injector import Firing, Injector
from torchscout.faults.plan import Fault, FaultPlan
from torchscout.testing.local_ranks import LiveRanks, RankError

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
"""Steps before the first cell: what replay does for the first time is slow, and the last of them is clean."""
_CLEAN_STEPS = 2
"""Besides the clean step before it, of a cell without faults."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One cell's steps, and what happens in them."""

    cell: Cell
    first: int
    """What is reported from here on is the cell's."""
    last: int
    faults: FaultPlan = field(default_factory=FaultPlan)
    """With steps as training counts them."""
    restored_after: int | None = None
    """The step after which all ranks get back the state from before it, where the fault has spoiled that."""
    waits: int = 0
    """Steps for which nothing happens but that replay comes to the right layer."""


def scheduled(cells: Sequence[Cell], layers: int) -> list[Slot]:
    """Every cell once: next comes the first that finds replay at the layer it needs."""
    left, slots = list(cells), list[Slot]()
    while left:
        done = slots[-1].last if slots else WARMUP
        candidates = [_slot(cell, slots[-1].last if slots else 0, done, layers) for cell in left]
        soonest = min(candidates, key=lambda slot: slot.waits)
        slots.append(soonest)
        left.remove(soonest.cell)
    return slots


def planned(slots: Sequence[Slot]) -> FaultPlan:
    """All that is going to happen."""
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
    assert isinstance(fault.when, range), "a cell's faults happen in steps that are known"
    return replace(fault, when=range(fault.when.start + steps, fault.when.stop + steps, fault.when.step))


EVERY_STEP = ReplayConfig(interval=1)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What ranks are asked for: to train on."""

    last: int
    """Up to this step."""
    restored_after: int | None = None
    """After this step, put back the state from before it."""


@dataclass(frozen=True, slots=True)
class WarmRankResult:
    """What one rank has to tell of it."""

    fired: list[Firing]
    failures: list[str]
    step_seconds: dict[int, float] = field(default_factory=dict)
    """What each step took here, checks not counted: what a rank knows without replay."""


def train(
    rank: int,
    stretches: Iterator[Stretch],
    layout: JobLayout,
    faults: FaultPlan,
    run_dir: Path,
    seed: int,
    replay: ReplayConfig = EVERY_STEP,
) -> Iterator[WarmRankResult]:
    """Go on with one training from stretch to stretch."""
    logging.getLogger("torchscout").addHandler(logging.NullHandler())  # the campaign tells what was found
    training = Training(layout, seed)
    with (
        Injector(faults, rank, training.net, training.optimizer) as injector,
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=replay,
            observer=None,
            parallelism=layout.mesh() if layout.apart else None,
            run_dir=run_dir,
        ) as session,
    ):
        updates = _Updates(training.optimizer)
        for stretch in stretches:
            fired, failed = len(injector.fired), len(session.failures)
            updates.seconds.clear()
            for step in range(session.step + 1, stretch.last + 1):
                before = _copied(training) if step == stretch.restored_after else []
                updates.begin(step)
                training.step(step)
                if before:
                    _restore(training, before)
            stopped = [off] if (off := (session.status()["replay"] or {}).get("off")) else []
            yield WarmRankResult(
                injector.fired[fired:], [*session.failures[failed:], *stopped], dict(updates.seconds)
            )


class _Updates:
    """Times each step up to its update, which is where a check begins."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seconds: dict[int, float] = {}
        self._step, self._began = 0, 0.0
        optimizer.register_step_pre_hook(lambda *_: self._end())

    def begin(self, step: int) -> None:
        self._step, self._began = step, time.perf_counter()

    def _end(self) -> None:
        self.seconds[self._step] = time.perf_counter() - self._began


def _copied(training: Training) -> list[torch.Tensor]:
    return [each.clone() for each in training.state()]


def _restore(training: Training, before: list[torch.Tensor]) -> None:
    """As a recovery would."""
    for each, saved in zip(training.state(), before, strict=True):
        each.copy_(saved)


_SECONDS = 120.0
"""What a cell may take, on a machine that is busy with other things."""
_REASON_CHARACTERS = 600


class Judge(Protocol):
    """Decides on the same evidence by itself."""

    def judge(self, slot: Slot, told: Sequence[WarmRankResult], run_dir: Path) -> Mapping[str, str]:
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
    """Cells of one layout; their evidence goes to ``folder``, and stays there for those that fail.

    ``replay`` must have a check at every step. Where there is a ``judge``, each set of ranks gets a new one.
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
    """Until all are done, or the ranks cannot be used for the next cell."""
    slots, layout = scheduled(cells, BLOCKS), cells[0].place
    reports, begin = Reports(run_dir), time.monotonic()
    try:
        started = retried(lambda: _started(body, layout, planned(slots), run_dir, seed))
    except RankError as error:
        yield _broken(slots[0], error.in_short, time.monotonic() - begin)
        return
    with started as ranks:
        for slot in slots:
            begin = time.monotonic()
            try:
                told: list[WarmRankResult] = ranks.ask(
                    Stretch(slot.last, slot.restored_after), timeout=_SECONDS
                )
            except RankError as error:
                yield _broken(slot, error.in_short, time.monotonic() - begin)
                return
            result = _graded(slot, told, reports, time.monotonic() - begin)
            if judge is not None:
                result = replace(result, ablated=judge.judge(slot, told, run_dir))
            yield result
            if result.grade.flaw is Flaw.BROKEN or any(each.step == slot.last for each in result.found):
                return  # the step that should have been clean was not: the next cell would suffer from it


def _started(
    body: Callable[..., Iterator[WarmRankResult]],
    layout: JobLayout,
    faults: FaultPlan,
    run_dir: Path,
    seed: int,
) -> LiveRanks:
    """Ranks that are about to train; on CUDA they have said that they can."""
    with ExitStack() as undo:
        ranks = LiveRanks(body, layout.ranks, layout, faults, run_dir, seed, backend=layout.backend)
        undo.callback(ranks.close)
        if layout.device == "cuda":  # which may refuse new processes: then no cell has begun
            ranks.ask(Stretch(0), timeout=_SECONDS)
        undo.pop_all()
    return ranks


def _graded(slot: Slot, told: Sequence[WarmRankResult], reports: Reports, took: float) -> Result:
    cell, new = slot.cell, reports.new()
    fired = [firing for each in told for firing in each.fired]
    given = grade(
        cell.truths,
        unfired=unfired(slot.faults, {(firing.rank, firing.at) for firing in fired}),
        incidents=[each.item for each in new if isinstance(each.item, Incident)],
        failures=[failure for each in told for failure in each.failures],
    )
    first = min((firing.monotonic for firing in fired), default=None)
    detail = fired[0].detail if fired else ""
    return found_in(cell, given, new, happened=first, took_seconds=took, detail=detail)


def _broken(slot: Slot, error: str, took: float) -> Result:
    reason = f"the ranks failed, and were replaced: {error[:_REASON_CHARACTERS]}"
    return found_in(slot.cell, Grade(Flaw.BROKEN, reason), [], happened=None, took_seconds=took)
