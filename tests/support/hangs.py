"""Small real jobs that hang, for a while or until their process group gives up."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchscout.config import ObserverConfig
from torchscout.decision.types import Incident, Resolved
from torchscout.run.reader import Stamped, incident_lines

QUICK = ObserverConfig(
    min_silence_seconds=1.0,
    silence_multiple=1.5,
    startup_seconds=8.0,
    checkpoint_write_seconds=1.0,
    grace_seconds=8.0,
)
STEPS, FAULTY_STEP, STALL = 8, 5, 5.0
"""A stall outlasts the threshold by far, and ends: the job then goes on and ends in order."""


class Net(torch.nn.Sequential):
    """Four layers; ``0`` to ``3`` are their names."""

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(16, 16) for _ in range(4)))


def steps() -> Iterator[int]:
    """Count training steps from 1, at a pace that observers can distinguish from a hang."""
    for step in range(1, STEPS + 1):
        time.sleep(0.02)
        yield step


def incidents(run_dir: Path) -> list[Incident]:
    return [item for item in _items(run_dir) if isinstance(item, Incident)]


def resolutions(run_dir: Path) -> list[Resolved]:
    return [item for item in _items(run_dir) if isinstance(item, Resolved)]


def _items(run_dir: Path) -> list[Any]:
    lines = incident_lines(run_dir)
    assert all(isinstance(line, Stamped) for line in lines), lines
    return [line.item for line in lines]


def wait_for_incident(run_dir: Path, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not incidents(run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)


def give_up_soon(seconds: float = 6.0) -> dist.ProcessGroup:
    """Make a group of all ranks whose collectives raise after a while instead of hanging for ever."""
    return dist.new_group(timeout=datetime.timedelta(seconds=seconds), group_desc="training")


def until_it_raises(body: Callable[[], None]) -> bool:
    """Return whether the body ended with the error that Gloo raises at a timeout."""
    try:
        body()
    except RuntimeError:
        return True
    return False
