"""Ranks that train with TorchTitan: as the catalog does, and with faults that only tests of it need."""

from __future__ import annotations

import ctypes
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from evaluation.jobs.job import Job, Report, Trial
from evaluation.jobs.titan import Setup, titan
from torchscout.faults.effects import FlipBit

_NEW_HOST_NAME = 0x04000000  # from linux/sched.h


@dataclass(frozen=True)
class Question:
    setup: Setup
    trial: Trial
    spoiled: tuple[int, int, int] | None = None
    """A rank, a step and an optimizer, a slot of which has a wrong bit after that step."""
    machine: int = 0
    """Ranks on a machine, each with a host name of its own; 0 leaves them where they are."""


class SpoiledJob(Job):
    def __init__(self, rank: int, question: Question) -> None:
        super().__init__(rank, question.trial)
        self._spoiled = question.spoiled

    def end(self, step: int) -> None:
        super().end(step)
        if self._spoiled is not None and (self.rank, step) == self._spoiled[:2]:
            slots = next(iter(self._optimizers[self._spoiled[2]].state.values()))
            FlipBit(20).corrupt(slots["exp_avg"])  # as memory does it: PyTorch does not count it as a write


def answering(rank: int, questions: Iterator[Question]) -> Iterator[Report]:
    for each in questions:
        yield answer(rank, each)


def answer(rank: int, question: Question) -> Report:
    if question.machine:
        move(f"machine-{rank // question.machine}")
    job = SpoiledJob(rank, question)
    titan(job, question.setup)
    return job.finish()


def found(reports: list[Report]) -> set[tuple[str, str, tuple[int, ...]]]:
    """What is reported: its kind, its scope, and who is named."""
    every = [each for one in reports for each in one.incidents]
    return {(each.manifestation.value, each.scope.value, each.ranks) for each in every}


def needs_host_names() -> None:
    if subprocess.run(["unshare", "--uts", "true"], check=False).returncode != 0:
        pytest.skip("ranks cannot have host names of their own here")


def move(name: str) -> None:
    """To a machine of that name, as far as anybody can ask this process. Only for root, and for good."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_HOST_NAME) != 0:
        raise OSError(ctypes.get_errno(), "a host name of one's own is not allowed here")
    socket.sethostname(name)
