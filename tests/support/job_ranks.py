"""Live ranks that train jobs of the catalog in ways that are none of its contracts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.job import Job, Report, Trial
from tests.support.hangs import incidents, wait_for_incident
from tests.support.ranks import LiveRanks
from torchscout.decision.types import Incident
from torchscout.faults.plan import FaultPlan


def answering(rank: int, questions: Iterator[Callable[[int], Any]]) -> Iterator[Any]:
    """Call with this rank what was sent."""
    for question in questions:
        yield question(rank)


@dataclass(frozen=True)
class Training:
    """What ranks are sent: train once, and report."""

    train: Callable[[Job], None]
    trial: Trial

    def __call__(self, rank: int) -> Report:
        job = Job(rank, self.trial)
        self.train(job)
        return job.finish()


def ask(ranks: LiveRanks, train: Callable[[Job], None] | str, trial: Trial) -> list[Report]:
    """Train a job, or one of the catalog by its name, with all comparisons recorded."""
    train = CATALOG[train].train if isinstance(train, str) else train
    return ranks.ask(Training(train, replace(trial, keeps_records=trial.run_dir is not None)), 400)


def seen(found: Sequence[Incident]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Manifestation, scope, ranks and step of each incident."""
    return [(each.manifestation.value, each.scope.value, each.ranks, each.step) for each in found]


def surfaces(found: Sequence[Incident]) -> set[str]:
    return {record.surface for each in found for record in each.records}


def overwritten(
    train: Callable[..., None],
    flips: Callable[[Any], torch.Tensor],
    ranks: LiveRanks,
    folder: Path,
    flip: tuple[int, int] = (1, 3),
) -> list[Report]:
    """Train while a rank holds something wrong from before a step on, as ``flips`` says."""
    trial = Trial(steps=flip[1] + 1, interval=1, run_dir=folder, flip=flip)
    reports = ask(ranks, partial(train, flips=flips), trial)
    assert reports[flip[0]].changed == 1
    return reports


def skips_are_no_updates(reports: list[Report]) -> None:
    """Check that each of six steps was checked, and that updates were where the optimizer had stepped."""
    for report in reports:
        assert (report.status["step"], report.status["replay"]["checks"]) == (6, 6)
        skipped = {each.step for each in report.numbers if "did not step" in str(each.reason)}
        assert skipped
        assert {each.step for each in report.numbers if each.surface == "optimizer/update"} == {
            *range(1, 7)
        } - skipped


def goes_back(
    ranks: LiveRanks, train: Callable[[Job], None], spoiled: Trial, step: int, folder: Path
) -> None:
    """Check that no checkpoint is loaded that was made after this step, whose numbers are wrong, and that
    training goes on from an earlier one as if nothing had happened."""
    kept = replace(spoiled, steps=7, interval=1, checkpoints=folder / "kept", run_dir=folder / "first")
    for report in ask(ranks, train, kept):
        assert {each.manifestation.value for each in report.incidents} == {"sdc"}
        assert report.status["checkpoint"]["poisoned"] == step
        assert report.status["checkpoint"]["latest"] < step
    alone = ask(ranks, train, Trial(steps=7))
    healthy = replace(kept, faults=FaultPlan(), flip=None, run_dir=folder / "second")
    for plain, report in zip(alone, ask(ranks, train, healthy), strict=True):
        assert 1 <= report.resumed < step
        assert report.bits == {at: bits for at, bits in plain.bits.items() if at > report.resumed}


def does_something_else(
    size: int, train: Callable[[Job], None], faults: FaultPlan, folder: Path
) -> list[Incident]:
    """Return what observers report of a job in which a rank does another collective. Gloo may abort a
    process over it, or never return: nobody is asked for an answer."""
    with LiveRanks(answering, size) as ranks:
        ranks.send(Training(train, Trial(run_dir=folder, min_silence_seconds=3.0, faults=faults)))
        wait_for_incident(folder, 120)
        ranks.have_answered(2.0)  # what else there is to be found
    return incidents(folder)
