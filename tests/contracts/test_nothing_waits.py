"""What torchscout suffers blocks nobody and changes no bit: training goes on to its end, and it is said."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch.distributed as dist

from evaluation.jobs.catalog import CATALOG
from evaluation.jobs.contracts import Attempt, Ranks
from evaluation.jobs.job import Job, Report, Trial
from tests.support.ranks import LiveRanks

NAME = "nanogpt"
STEPS, FIRST, LAST = 24, 8, 18
"""The trouble comes before ``FIRST``; before ``LAST`` ranks look for what is said, for a while."""
PATIENCE = 20.0


def observer(number: int) -> None:
    """Send a signal to this rank's observer."""
    for each in psutil.Process().children():
        if "torchscout.observer.process" in each.cmdline():
            os.kill(each.pid, number)


def in_the_way(folder: Path | None) -> None:
    """Replace a folder by a file, which not even root can write into."""
    assert folder is not None
    while folder.is_dir():  # somebody may write there meanwhile
        shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("a file in the way")


def barred(run_dir: Path | None) -> None:
    """Let every write of records fail, which do not follow links."""
    assert run_dir is not None
    for rank in range(3):
        path = run_dir / "records" / f"rank-{rank}.jsonl"
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/full")


class Trouble(NamedTuple):
    name: str
    ranks: range
    """Which ranks it happens to."""
    happens: Callable[[Trial], object]
    said: str
    """What is found in the status, the failures or the log of a rank; a pattern."""


ALL = range(3)
NO_ANSWER = r'"observer": \{"problem"'
TROUBLES = [
    Trouble("an observer is stopped", range(1, 2), lambda _: observer(signal.SIGSTOP), NO_ANSWER),
    Trouble("an observer is killed", range(1, 2), lambda _: observer(signal.SIGKILL), r'"restarts": [1-9]'),
    Trouble("the hub is stopped", range(1), lambda _: observer(signal.SIGSTOP), NO_ANSWER),
    Trouble("all observers are stopped", ALL, lambda _: observer(signal.SIGSTOP), NO_ANSWER),
    Trouble("all observers are killed", ALL, lambda _: observer(signal.SIGKILL), r'"restarts": [1-9]'),
    Trouble(
        "the run directory is lost",
        range(1),
        lambda trial: in_the_way(trial.run_dir),
        "File exists|Not a directory",
    ),
    Trouble("no records can be written", range(1), lambda trial: barred(trial.run_dir), r"rank-\d\.jsonl"),
    Trouble(
        "the folder of checkpoints is lost",
        range(1),
        lambda trial: in_the_way(trial.checkpoints and trial.checkpoints / "files"),
        "cannot write",
    ),
]


class TroubledJob(Job):
    def __init__(self, rank: int, trial: Trial, trouble: Trouble) -> None:
        super().__init__(rank, trial)
        self._all, self._trouble = trial, trouble
        self.said = ""
        """The status, the failures and the log, as soon as they have what must be said."""

    def begin(self, step: int) -> None:
        if step == FIRST:
            dist.barrier()
            if self.rank in self._trouble.ranks:
                self._trouble.happens(self._all)
            dist.barrier()
        if step == LAST:
            self._trial = replace(self._trial, keeps_records=False)  # they may be lost
            deadline = time.monotonic() + PATIENCE
            while not re.search(self._trouble.said, self.said) and time.monotonic() < deadline:
                time.sleep(0.2)
                assert self.session is not None
                found = [self.session.status(), self.session.failures, self.report.log]
                self.said = json.dumps(found, default=str)
        super().begin(step)


def answering(rank: int, asked: Iterator[tuple[Trial, int]]) -> Iterator[tuple[Report, str]]:
    for trial, number in asked:
        job = TroubledJob(rank, trial, TROUBLES[number])
        CATALOG[NAME].train(job)
        yield job.finish(), job.said


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    folder = tmp_path_factory.mktemp("plain")
    with Ranks(Attempt(NAME, folder, folder)) as ranks:
        return ranks.plain(STEPS)


@pytest.fixture(scope="module")
def three() -> Iterator[LiveRanks]:
    with LiveRanks(answering, 3) as ranks:
        yield ranks


@pytest.mark.slow_except("all observers*")
@pytest.mark.long_cases("all observers*")
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda each: each.name)
def test_training_goes_on_bitwise_to_its_end_and_the_problem_is_said(
    trouble: Trouble, three: LiveRanks, plain: list[dict[int, str]], tmp_path: Path
):
    checkpoints = tmp_path / "kept" if "checkpoints" in trouble.name else None
    trial = Trial(
        steps=STEPS, interval=2, run_dir=tmp_path / "run", keeps_records=True, checkpoints=checkpoints
    )
    answers = three.ask((trial, TROUBLES.index(trouble)), 300)
    for (report, _), alone in zip(answers, plain, strict=True):
        assert report.incidents == []
        assert report.bits == {step: bits for step, bits in alone.items() if step <= STEPS}
    said = [each for _, each in answers]
    assert any(re.search(trouble.said, each) for each in said), said
