"""What the kernel gives a process: signals, clocks, limits."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from pathlib import Path

from torchscout.cli.doctor.facts import Clock, Limits, Stacks
from torchscout.observer import stacks

__all__ = ["clock", "limits", "own_stacks"]

_STACK_SECONDS = 2.0
_SLEEP_SECONDS = 0.02


def own_stacks(number: int) -> Stacks:
    """Ask this process for its stacks as an observer asks a trainer; from its main thread."""
    with tempfile.TemporaryDirectory(prefix="torchscout-doctor-") as name:
        try:
            registration = stacks.register(Path(name), number)
        except (OSError, ValueError) as error:
            return Stacks(number, str(error))
        try:
            told = stacks.take(os.getpid(), registration.path, number, _STACK_SECONDS)
        finally:
            registration.unregister()
    return Stacks(number, None if "own_stacks" in told else "the signal was sent, and no stack was written")


def clock() -> Clock:
    info = time.get_clock_info("monotonic")
    before = time.monotonic()
    time.sleep(_SLEEP_SECONDS)
    return Clock(info.monotonic, info.resolution, time.monotonic() - before, _SLEEP_SECONDS)


def limits() -> Limits:
    return Limits(_hard(resource.RLIMIT_NOFILE), _hard(resource.RLIMIT_FSIZE))


def _hard(kind: int) -> int | None:
    _, most = resource.getrlimit(kind)
    return None if most == resource.RLIM_INFINITY else most
