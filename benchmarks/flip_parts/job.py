"""One short job on one rank: trained with checks, one bit flipped on the way, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flip_parts.flip import Flip, Flipped, Held, digest_of, flip_a_bit
from torchscout.attach import enable_resiliency
from torchscout.config import CheckpointConfig, ReplayConfig

STEPS, INTERVAL = 20, 5


@dataclass(frozen=True, slots=True)
class Asked:
    """One job."""

    folder: Path
    flip: Flip | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """One incident."""

    manifestation: str
    ranks: tuple[int, ...]
    step: int
    surface: str
    reporter: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank has seen."""

    flipped: Flipped | None
    incidents: list[Seen]
    failures: list[str]
    certified: int | None
    verified: int | None
    """The newest generation of checkpoints that is verified."""
    watched: float | None
    digest: str
    """Of all that the rank holds at the end."""
    held_up: dict[str, str] = field(default_factory=dict)


@dataclass
class Work:
    """A model in training on this rank."""

    trained: tuple[Any, ...]
    """What ``enable_resiliency`` is given."""
    held: Callable[[], Held]
    step: Callable[[int, Callable[[str], None]], None]
    """Train for one step, and say which moment it is; see ``flip.MOMENTS``."""
    leave: Callable[[], None] = lambda: None
    """Make room for the next job."""


def train_all(rank: int, jobs: Iterator[Asked], make: Callable[[int], Work]) -> Iterator[Found]:
    for job in jobs:
        yield _train(rank, job, make)


def _train(rank: int, job: Asked, make: Callable[[int], Work]) -> Found:
    torch.manual_seed(0)
    work = make(rank)
    os.environ["TORCHSCOUT_MEMORY"] = str(job.folder / "memory")
    session = enable_resiliency(
        *work.trained,
        replay=ReplayConfig(interval=INTERVAL),
        observer=None,
        checkpoint=CheckpointConfig(job.folder / "files"),
        run_dir=job.folder / "run",
    )
    flipped: list[Flipped] = []
    try:
        session.resume()
        torch.manual_seed(rank)
        for step in range(1, STEPS + 1):

            def now(moment: str, step: int = step) -> None:
                flip = job.flip
                if flip is not None and (flip.rank, flip.step, flip.moment) == (rank, step, moment):
                    flipped.append(flip_a_bit(work.held(), flip.seed))

            work.step(step, now)
        dist.barrier()  # the rank that reports an incident has written it by now
        status = session.status()
        found = Found(
            flipped[0] if flipped else None,
            [_seen(each) for each in session.incidents],
            [str(each) for each in session.failures],
            session.certified_step,
            status["checkpoint"]["verified"],
            status["replay"]["watched"],
            digest_of(work.held()),
            dict(status["replay"]["held_up"]),
        )
        dist.barrier()
    finally:
        session.close()
        work.leave()
    return found


def _seen(incident: Any) -> Seen:
    return Seen(
        incident.manifestation.value,
        tuple(incident.ranks),
        incident.step,
        incident.records[0].surface if incident.records else "",
        incident.reporter,
        str(getattr(incident, "sentence", "")),
    )
