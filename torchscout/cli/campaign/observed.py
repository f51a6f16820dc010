"""What the ranks of a job that may hang run: training, each rank with its observer (paper, section 7)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchscout.attach import enable_resiliency
from torchscout.cli.campaign.layout import Layout
from torchscout.cli.campaign.training import Training
from torchscout.config import ObserverConfig
from torchscout.faults.injector import Injector
from torchscout.faults.plan import FaultPlan
from torchscout.observer.monitor import HangMonitor

__all__ = ["QUICK", "READY", "TRAIN", "Told", "be_quiet", "firings_of", "observers_of", "steps", "train"]

STEPS = 6
QUICK = ObserverConfig(floor_seconds=1.0, start_seconds=20.0, grace_seconds=3.0)
READY, TRAIN = "ready", "train"
"""What ranks are asked: to say that they have started, then to train."""
_MEETING_SECONDS = 5.0
_PAUSE_SECONDS = 0.02
"""Between steps: a job that does nothing but communicate is not what observers look at."""


_LOGGED_EVERY = 2
"""Steps."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank has to tell."""

    failures: list[str]


def train(
    rank: int,
    questions: Iterator[Any],
    layout: Layout,
    faults: FaultPlan,
    run_dir: Path,
    observer: ObserverConfig = QUICK,
) -> Iterator[Told]:
    """One short training, once it is asked for."""
    be_quiet(run_dir)
    training = Training(layout)
    log = firings_of(run_dir) / f"rank-{rank}.jsonl"
    with (
        enable_resiliency(
            training.model,
            training.optimizer,
            replay=None,
            observer=observer,
            parallelism=layout.mesh() if layout.tensor > 1 else None,
            run_dir=run_dir,
        ) as session,
        Injector(faults, rank, training.net, training.optimizer, log=log) as injector,
    ):
        if session.watching is not None:
            (observers_of(run_dir) / str(rank)).write_text(str(session.watching.observer.pid))
            _await_hubs(session.watching)
        for question in questions:
            if question == TRAIN:
                steps(training, session.watch_input(injector.input(training.batches())))
            yield Told(session.failures)


def _await_hubs(watching: HangMonitor) -> None:
    """A job that hangs within a moment of its start is another story: observers have yet to meet."""
    deadline = time.monotonic() + _MEETING_SECONDS
    while not all(watching.status()["connected"]) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)


def steps(training: Training, batches: Iterable[torch.Tensor]) -> None:
    """A few of them, whatever happens on the way."""
    for step, tokens in zip(range(1, STEPS + 1), batches, strict=False):
        loss = training.step(step, tokens)
        if step % _LOGGED_EVERY == 0:
            loss.item()  # as a job that logs it: a CUDA host waits for its device there and nowhere else
        time.sleep(_PAUSE_SECONDS)
    if training.device.type == "cuda":
        torch.cuda.synchronize(training.device)


def be_quiet(run_dir: Path) -> None:
    """The campaign tells what was found; what Gloo has to say of mismatched collectives goes to a file."""
    logging.getLogger("torchscout").addHandler(logging.NullHandler())
    with (run_dir / "errors.log").open("a") as log:
        os.dup2(log.fileno(), 2)


def firings_of(run_dir: Path) -> Path:
    """Where ranks write down that a fault happens, before it does."""
    return run_dir / "firings"


def observers_of(run_dir: Path) -> Path:
    """Where the process numbers of observers are."""
    return run_dir / "observer-processes"
